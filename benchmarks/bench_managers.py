"""Replicas under torchft's Managers and its lighthouse, which benchmarks kill or freeze.

In a rank a `Replica` commits steps until it is killed; the launcher holds a `ManagedJob`, which
strikes one replica after the other and replaces it. Needs torchft, but for `is_installed()`.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import bench_ranks as ranks
import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=60)
OF_TORCHFT = "torchft."
MOST_OF_RECOVERY_S = 60.0
STEADY = 5  # commits, or sums of an endless step, before a strike
HEARTBEAT_MS = 1000  # the lighthouse's, after which a silent replica is left out; our groups', too
Message = dict[str, Any]


def is_installed() -> bool:
    return importlib.util.find_spec("torchft") is not None


# ---- in a rank ----


def limit_of_strikes(engine: str) -> timedelta:
    """Of an operation and of configure(), in which a child of torchft's starts."""
    return timedelta(seconds=15 if engine.startswith(f"{OF_TORCHFT}Baby") else 5)


def make_group(engine: str, limit: timedelta = LIMIT) -> Any:
    package = "torchft" if engine.startswith(OF_TORCHFT) else "torchft_ext"
    groups = importlib.import_module(f"{package}.process_group")
    return getattr(groups, f"ProcessGroup{engine.removeprefix(OF_TORCHFT)}")(timeout=limit)


def has_spare(group: Any) -> bool:
    """Whether its next configure() finds a child that has started; yes, if it needs none."""
    return not hasattr(group, "spare_is_ready") or bool(group.spare_is_ready())


def make_manager(
    group: Any, store: dist.TCPStore, lighthouse: str, replica: str, **more: Any
) -> Any:
    """Make a Manager of a replica of one rank, which goes on alone where it has to."""
    from torchft.manager import Manager

    return Manager(
        pg=group,
        min_replica_size=1,
        init_sync=False,  # replicas begin alike; a first step that heals counts a part
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=replica,
        **more,
    )


class Replica:
    """Commits one step after the other under a Manager, and tells of the first after a failure.

    A step is one sum of `bytes`. With `endless` it is a sum of one element, until all replicas are
    steady; then one sum of `bytes` after the other, so that a strike falls into one on every
    replica.
    """

    def __init__(self, command: Message) -> None:
        os.environ["TORCHFT_EXT_HEARTBEAT"] = str(HEARTBEAT_MS / 1000)
        limit = limit_of_strikes(command["engine"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._world = command["world"]
        self._elements = command["bytes"] // 4
        self._endless = command["endless"]
        self._ballast = ranks.hold_memory(command["resident"])
        self._steady = 0  # complete commits in a row
        self._was_complete = False
        self._told = False  # that it is steady, since it was complete
        self._failure: Message = {"failed": 0.0}  # the first one since the last commit
        self._times: dict[str, float] = {}
        self._group = make_group(command["engine"], limit)
        self._note_configures()
        self._manager = make_manager(
            self._group,
            self._store,
            command["lighthouse"],
            command["name"],
            load_state_dict=lambda state: None,
            state_dict=lambda: {},
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=LIMIT,
        )

    def run(self) -> None:
        """Until this process is killed."""
        step = self._endless_step if self._endless else self._one_sum
        tensor = torch.ones(1 if self._endless else self._elements)
        while True:
            self._manager.start_quorum()
            step(tensor)
            if self._manager.should_commit():
                self._note_commit()
            else:
                self._steady = 0

    def _note_configures(self) -> None:
        """Have the group's configure() note when it begins and ends."""
        configure = self._group.configure

        def timed(*args: object, **kwargs: object) -> None:
            self._times["asked"] = time.monotonic()
            configure(*args, **kwargs)
            self._times["configured"] = time.monotonic()

        self._group.configure = timed

    def _one_sum(self, tensor: torch.Tensor) -> bool:
        """Whether it went well, as far as this replica knows."""
        self._manager.allreduce(tensor).wait()
        now, error = time.monotonic(), self._manager.errored()
        if error is None:
            self._times["summed"] = now
        elif not self._failure["failed"]:
            self._failure = {"failed": now, **words_of(error.original_exception)}
        return error is None

    def _endless_step(self, tensor: torch.Tensor) -> None:
        """The replicas' mean tells each of them whether all of them are steady."""
        tensor.fill_(float(self._steady >= STEADY and has_spare(self._group)))
        if not self._one_sum(tensor) or tensor.item() < 1:
            return
        sums = torch.zeros(self._elements)
        for done in itertools.count(1):
            if not self._one_sum(sums):
                return
            if done == STEADY:
                self._tell_steady()

    def _note_commit(self) -> None:
        complete = self._manager.num_participants() == self._world
        if self._was_complete and not complete:
            committed = time.monotonic()
            ranks.reply("recovered", committed=committed, **self._failure, **self._times)
        self._told = self._told and complete
        self._was_complete, self._failure = complete, {"failed": 0.0}
        self._steady = self._steady + 1 if complete else 0
        if self._endless or self._steady < STEADY or self._told:
            return
        if has_spare(self._group):
            self._told = True
            self._tell_steady()

    def _tell_steady(self) -> None:
        rank = self._manager.participating_rank()
        ranks.reply("steady", rank=rank, resident=ranks.resident_bytes())


def words_of(error: Exception) -> Message:
    """What is kept of a failure: no error, whose frames would hold tensors."""
    cause = getattr(getattr(error, "cause", None), "rank", None)
    return {"error": type(error).__name__, "cause_rank": cause, "text": str(error)}


# ---- in the launcher ----


@dataclass(frozen=True)
class Struck:
    """One strike, and what became of it."""

    when: float
    victim: Message  # what it told when it was steady
    answers: list[Message]  # the survivors', at their first commit without it


class ManagedJob:
    """One job under a lighthouse, whose newest replica is struck, and replaced before the next.

    Who will replace them has started before: a start would take the processors from survivors. A
    context manager; the processes are the pool's.
    """

    def __init__(
        self,
        pool: ranks.Pool,
        engine: str,
        world: int,
        strikes: int,
        *,
        size: int,
        resident: int = 0,
        endless: bool = False,
    ) -> None:
        from torchft.coordination import LighthouseServer

        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=20_000,
            heartbeat_timeout_ms=HEARTBEAT_MS,
        )
        self._pool = pool
        self._world = world
        self._resident = resident
        self._told = {
            "engine": engine,
            "world": world,
            "lighthouse": self._lighthouse.address(),
            "bytes": size,
            "endless": endless,
        }
        self._waiting = pool.start(world + strikes - 1)
        self._living: list[ranks.RankProcess] = []
        self._started = 0

    def __enter__(self) -> ManagedJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lighthouse.shutdown()

    def strike(self, number: signal.Signals, delay_s: float = 0.0) -> Struck:
        """Send this signal to the newest replica, so long after all are steady; await the others.

        Raises RankFailed where one ends, or does not commit any more for a minute.
        """
        self._fill()
        steady = self._pool.gather(self._living, "steady", 2 * MOST_OF_RECOVERY_S)
        time.sleep(delay_s)
        victim = self._living.pop()
        when = victim.signal(number)
        answers = self._pool.gather(self._living, "recovered", MOST_OF_RECOVERY_S)
        self._pool.drop(victim)
        return Struck(when, steady[-1], answers)

    def _fill(self) -> None:
        """The last one is the next victim: it alone has the resident memory."""
        while len(self._living) < self._world:
            process = self._waiting.pop()
            self._living.append(process)
            resident = self._resident if len(self._living) == self._world else 0
            process.send("train", name=f"replica{self._started}", resident=resident, **self._told)
            self._started += 1
