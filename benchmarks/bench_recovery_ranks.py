"""The ranks of recovery.py: three kinds of members, and what each does in a round.

A replica under torchft's Manager, the fourth kind, is in bench_managers: nobody tells it of rounds.

A rank is started anew by the launcher, and takes its commands from bench_ranks.commands().
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import bench_ranks as ranks
import torch
import torch.distributed as dist
from bench_managers import Replica, words_of

LIMIT = timedelta(seconds=60)
GLOO_TIMEOUT = timedelta(seconds=5)
WARM_UP = 5
STATE_BYTES = 4 * 2**20
Message = dict[str, Any]
MonitorState = dict[str, bool]


class FtMember:
    """Begins generations by configure(), on one group for life that starts with itself alone."""

    def __init__(self, store: dist.Store, address: str) -> None:
        import torchft_ext

        alone = dist.PrefixStore(f"alone/{os.getpid()}", store)
        dist.init_process_group("ft", store=alone, rank=0, world_size=1, timeout=LIMIT)
        self._backend = torchft_ext.backend()
        self._address = address
        self.error: type[Exception] = torchft_ext.CommError

    def begin(self, prefix: str, rank: int, size: int, *, survived: bool = False) -> None:
        del survived  # the same either way
        self._backend.configure(f"{self._address}/{prefix}", rank, size, timeout=LIMIT)

    def monitor(self) -> MonitorState | None:
        """Of the peer monitor, if there is one: what makes it quick."""
        return monitor_of(self._backend)

    def phases(self) -> dict[str, float]:
        """No part of configure() is told apart."""
        return {}


def monitor_of(backend: Any) -> MonitorState | None:
    """What makes the peer monitor quick; None: there is none."""
    stats = backend.stats()["monitor"]
    if stats is None:
        return None
    return {name: bool(stats[name]) for name in ("realtime", "private_tables")}


class ElasticMember:
    """Begins generations as the members of a job agree. A victim joins as a newcomer."""

    def __init__(self, address: str, founders: int, most: int) -> None:
        import torchft_ext
        from torchft_ext import elastic

        self._elastic = elastic
        self._state = elastic.State(weights=torch.ones(STATE_BYTES // 4))
        self._job = elastic.join(
            f"{address}/elastic", size=founders, min_size=1, max_size=most, timeout=LIMIT
        )
        self._backend = torchft_ext.backend()
        self.error: type[Exception] = torchft_ext.CommError

    def begin(self, prefix: str, rank: int, size: int, *, survived: bool = False) -> None:
        """Ranks are the view's: the newcomer's is the last."""
        del prefix, rank, survived
        view = self._job.recover()
        while view.size < size:  # the newcomer, or the spare, has not come yet
            time.sleep(0.001)
            view = self._job.recover()

    def monitor(self) -> MonitorState | None:
        """As FtMember's."""
        return monitor_of(self._backend)

    def phases(self) -> dict[str, float]:
        """How long each part of the last recovery took, in seconds; with a sync, made now."""
        view = self._job.view()
        if view is None:
            return {}
        done = self._elastic.sync(
            self._state,
            self._job.group,
            continuing=True,
            lineage=view.lineage,
            step=0,
            dirty=False,
        )
        parts = {**view.phases, "sync": done.elapsed}
        return {name: took.total_seconds() for name, took in parts.items()}

    def close(self) -> None:
        """Say goodbye."""
        self._job.close()


class GlooMember:
    """Begins generations by destroying the group and making another."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.error: type[Exception] = RuntimeError

    def begin(self, prefix: str, rank: int, size: int, *, survived: bool = False) -> None:
        """Survivors learn of a death up to its timeout apart: they wait for each other longer."""
        if dist.is_initialized():
            dist.destroy_process_group()
        prefixed = dist.PrefixStore(prefix, self._store)
        timeout = LIMIT if survived else GLOO_TIMEOUT
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=timeout)

    def monitor(self) -> MonitorState | None:
        """It has none."""
        return None

    def phases(self) -> dict[str, float]:
        """No part of a recovery is told apart."""
        return {}


Member = FtMember | ElasticMember | GlooMember


def make_member(command: Message, store: dist.Store) -> Member:
    if command["engine"] == "ft":
        return FtMember(store, command["address"])
    if command["engine"] == "elastic":
        return ElasticMember(command["address"], command["founders"], command["most"])
    return GlooMember(store)


def reduce_until_failure(command: Message, error_type: type[Exception]) -> Message:
    """Allreduce on and on; when and how one failed. A victim does not return.

    The error's words are kept, not the error: with its frames it would make a cycle that holds
    their tensors until the collector frees those of many rounds at once, in the middle of one.
    """
    tensor = torch.zeros(command["bytes"] // 4)
    done = 0
    try:
        while True:
            dist.all_reduce(tensor)
            done += 1
            if done == WARM_UP:
                ranks.reply("busy")
                while command["blocked"] and command["rank"] == command["victim"]:
                    time.sleep(1)
    except error_type as error:
        released = time.monotonic()
        return {"released": released, **words_of(error)}


def take_part(member: Member, command: Message) -> None:
    rank, size, victim = command["rank"], command["size"], command["victim"]
    member.begin(command["prefix"], rank, size)
    failed = reduce_until_failure(command, member.error)
    if command["replaced"]:
        go_on(member, size, failed)
        return
    member.begin(command["prefix"] + "-after", rank - (rank > victim), size - 1, survived=True)
    configured = time.monotonic()
    good = sum_of_ones(size - 1)
    times = {"configured": configured, "began": configured, "good": good}
    phases = member.phases()
    ranks.reply("recovered", **failed, **times, monitor=member.monitor(), phases=phases)


def go_on(member: Member, size: int, failed: Message) -> None:
    """With a spare in the dead member's place: the state is compared before the first sum."""
    member.begin("", 0, size, survived=True)
    configured = time.monotonic()
    phases = member.phases()
    began = time.monotonic()
    good = sum_of_ones(size)
    times = {"configured": configured, "began": began, "good": good}
    ranks.reply("recovered", **failed, **times, monitor=member.monitor(), phases=phases)


def sum_of_ones(size: int) -> float:
    """One good allreduce in a world of so many; when it was over."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    good = time.monotonic()
    if ones.item() != size:
        raise RuntimeError(f"the sum of ones over {size} ranks is {ones.item()}")
    return good


def rank_main() -> None:
    store = ranks.connect_store()
    member: Member | None = None
    ballast = torch.empty(0)
    for command in ranks.commands():
        if command["cmd"] == "start":
            member = make_member(command, store)
            ballast = ranks.hold_memory(command["resident"])
            ranks.reply("started", resident=ranks.resident_bytes())
        elif command["cmd"] == "train":
            Replica(command).run()
        elif command["cmd"] == "spare":
            assert member is not None
            go_on(member, command["size"], {})
        else:
            assert member is not None
            take_part(member, command)
    del ballast
    if isinstance(member, ElasticMember):
        member.close()
    if dist.is_initialized():
        dist.destroy_process_group()
