"""An elastic job of one process that does what a test says, for tests of elastic.steps()."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import torchft_ext
from torchft_ext.elastic._replicas import Held, Place, Replicas
from torchft_ext.elastic._sampler import BatchSampler
from torchft_ext.elastic._state import State
from torchft_ext.elastic._steps import steps
from torchft_ext.elastic._view import Answer, Digest, View

ME = "aa"
LOST = torchft_ext.PeerLostError("allreduce: rank 1 is lost")
Members = tuple[str, ...]


class FakeJob:
    """A job whose views and answers are written down before; `events` says what was asked."""

    min_size = 1
    timeout = timedelta(seconds=5)
    limit = timedelta(seconds=1)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.events: list[str] = []
        self.lines: list[str] = []  # of the log
        self.members: list[Members] = [(ME, "bb")]  # of the next views; the last one stays
        self.continuing: list[bool] = []  # of the others in the next views; else those of before
        self.answers: list[Answer | Exception] = []  # of the next agreements; else yes
        self.recoveries: list[Exception] = []  # that the next recover() raise
        self.newcomers = ["somebody"]  # that wait
        self.limits: list[timedelta | None] = []  # that recover() was given
        self.patience: list[timedelta | None] = []  # likewise
        self.shards: list[int | None] = []  # that it was told to hold
        self.awaited: list[tuple[tuple[int, ...], float]] = []  # with the patience, in seconds
        self.last: list[bool] = []  # of each vote
        self.failure: torchft_ext.CommError | None = None
        self.leaving = False
        self.ends: list[bool] = []  # whether each was agreed on
        self._view: View | None = None

    def view(self) -> View | None:
        return self._view

    def is_over(self) -> bool:
        return self.failure is not None

    def is_leaving(self) -> bool:
        return self.leaving

    def waiting(self) -> list[str]:
        return self.newcomers

    def recover(
        self, timeout: timedelta | None = None, *, patience: timedelta | None = None
    ) -> View:
        self.events.append("recover")
        self.limits.append(timeout)
        self.patience.append(patience)
        if self.recoveries:
            raise self.recoveries.pop(0)
        self.failure = None
        last = self._view
        members = self.members.pop(0) if len(self.members) > 1 else self.members[0]
        before = last.members if last is not None else ()
        others = self.continuing.pop(0) if self.continuing else None
        self._view = View(
            number=1 if last is None else last.number + 1,
            lineage=b"lineage 16 bytes",
            rank=members.index(ME),
            size=len(members),
            old_size=len(before),
            members=members,
            continuing=ME in before,
            members_continuing=tuple(
                name in before if name == ME or others is None else others for name in members
            ),
        )
        return self._view

    def agree(
        self,
        ok: bool,
        note: bytes = b"",
        timeout: timedelta | None = None,
        digest: Digest | None = None,
        *,
        last: bool = False,
    ) -> Answer:
        self.events.append("agree")
        self.last.append(last)
        answer = self.answers.pop(0) if self.answers else Answer(ok)
        if isinstance(answer, Exception):
            raise answer
        return replace(answer, last=answer.last or last)

    def leave(self) -> None:
        self.leaving = True

    def end(self, *, agreed: bool = True) -> None:
        self.ends.append(agreed)

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def abort(self, reason: str) -> None:
        self.events.append(f"abort {reason}")

    def hold_groups(self) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(lambda: None)

    def hold_shard(self, shard: int | None) -> None:
        self.shards.append(shard)

    def await_frozen(self, ranks: Sequence[int], patience: timedelta) -> None:
        self.awaited.append((tuple(ranks), patience.total_seconds()))

    def wait_at_most(self, timeout: timedelta) -> AbstractContextManager[None]:
        return nullcontext()

    def count_steps(self, committed: int) -> None:
        self.committed = committed

    def log(self, line: str) -> None:
        self.lines.append(line)

    def fail(self, error: torchft_ext.CommError = LOST) -> None:
        """A collective of the managed group fails."""
        self.failure = error
        raise error


def a_job() -> Iterator[FakeJob]:
    """Of a fixture."""
    group = torchft_ext.make_group(dist.HashStore(), 0, 1)
    yield FakeJob(group)
    group.shutdown()


def a_state() -> State:
    """Of a fixture."""
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return State(model, optimizer, BatchSampler(100, 2))


class FakeReplicas(Replicas):
    """Of one shard: this member trains in it, or is parked."""

    def __init__(self, place: Place | None) -> None:
        super().__init__(1)
        self.given = place

    def follow(self, job: object, view: View, held: Held) -> tuple[int, bool]:
        self.place = self.given
        return 0, False


class LosingBuild:
    """Of a model for a view: a member is lost the first time, before the sync."""

    def __init__(self) -> None:
        self._failures = [LOST]

    def __call__(self, view: View) -> None:
        if self._failures:
            raise self._failures.pop()


def commit_all(state: State, job: FakeJob, total: int) -> None:
    for step in steps(state, total, job=job):
        with step:
            step.commit()
