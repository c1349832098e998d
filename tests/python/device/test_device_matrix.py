"""The failure matrix on devices: every operation, struck while it is under way, by every strike.

Survivors live from case to case. Of the simulated device a part is run, of a GPU all
(TORCHFT_EXT_TEST_MATRIX=all or part overrides).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from device_side import (
    accelerator,
    buffers_are_unchanged,
    check_sum,
    keep_buffers,
    no_violation,
    ones,
    stream_waits_for,
)
from rankside import ErrorInfo, abort, backend, describe, failure_of, seconds, wait_errored
from records import record
from timing import assert_within
from values import me

HEARTBEAT = 3.0  # seconds
NOTICE = 20.0  # seconds in which a failure must have reached everyone, however slow the machine
# Seconds beside the heartbeat limit of a stopped rank, on the simulated device: the failure
# matrix's 100 ms, with the scale that it has where a machine has fewer cores than ranks.
BOUND = 0.1 * 3
AFTER_THAW = 1.0  # seconds in which nothing may be written late

Begun = tuple[dist.Work, list[torch.Tensor]]


def all_reduce(victim: int) -> Begun:
    tensor = ones(1000)
    return dist.all_reduce(tensor, async_op=True), [tensor]


def broadcast(victim: int) -> Begun:
    tensor = ones(1000)
    return dist.broadcast(tensor, victim, async_op=True), [tensor]


def reduce(victim: int) -> Begun:
    tensor, root = ones(1000), (victim + 1) % me()[1]
    return dist.reduce(tensor, root, async_op=True), [tensor]


def all_gather(victim: int) -> Begun:
    outputs = [ones(1000) for _ in range(me()[1])]
    return dist.all_gather(outputs, ones(1000), async_op=True), outputs


def reduce_scatter(victim: int) -> Begun:
    output = ones(1000)
    inputs = [ones(1000) for _ in range(me()[1])]
    return dist.reduce_scatter(output, inputs, async_op=True), [output, *inputs]


def all_to_all(victim: int) -> Begun:
    output, source = ones(10 * me()[1]), ones(10 * me()[1])
    return dist.all_to_all_single(output, source, async_op=True), [output, source]


def receive(victim: int) -> Begun:
    tensor = ones(1000)
    return dist.irecv(tensor, victim), [tensor]


OPERATIONS: dict[str, Callable[[int], Begun]] = {
    function.__name__: function
    for function in (
        all_reduce,
        broadcast,
        reduce,
        all_gather,
        reduce_scatter,
        all_to_all,
        receive,
    )
}
STRIKES = ("kill", "stop", "abort")


@dataclass(frozen=True)
class Case:
    """Attributes: busy: the victim too is in the midst of operations, one after the other."""

    operation: str
    strike: str
    size: int
    victim: int
    busy: bool = False

    def __str__(self) -> str:
        busy = "-busy" if self.busy else ""
        return f"{self.operation}{busy}-{self.strike}-{self.victim}-of-{self.size}"


def busy_cases() -> list[Case]:
    sizes = ((2, 1), (3, 0), (4, 2))
    return [Case("all_reduce", s, size, v, busy=True) for s in STRIKES for size, v in sizes]


ALL = [
    *busy_cases(),
    *(Case(operation, "kill", 3, 1) for operation in OPERATIONS if operation != "receive"),
    *(Case(operation, "abort", 2, 1) for operation in OPERATIONS),
    Case("receive", "kill", 2, 1),
    Case("receive", "stop", 2, 1),
    Case("all_reduce", "stop", 4, 3),
]
PART = [
    Case("all_reduce", "kill", 3, 0, busy=True),
    Case("all_reduce", "stop", 2, 1, busy=True),
    Case("all_reduce", "abort", 4, 2, busy=True),
    Case("all_to_all", "kill", 3, 1),
    *(Case(operation, "abort", 2, 1) for operation in ("reduce_scatter", "broadcast", "receive")),
]


def chosen() -> list[Case]:
    wanted = os.environ.get("TORCHFT_EXT_TEST_MATRIX", "part" if accelerator.simulated() else "all")
    return {"all": ALL, "part": PART}[wanted]


# ---- in a rank


def meet(operation: str, victim: int) -> None:
    """Have made and connected what the operation needs, so that it is struck on its way."""
    check_sum()
    rank, world = me()
    if operation != "receive":
        return OPERATIONS[operation](victim)[0].check()
    others = [peer for peer in range(world) if peer != rank]
    batch = [dist.P2POp(dist.isend, ones(1), peer) for peer in others]
    batch += [dist.P2POp(dist.irecv, ones(1), peer) for peer in others]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    backend().check()


def blocked(operation: str, victim: int) -> tuple[ErrorInfo, float, float]:
    """The error, when it was raised, and when the stream was free.

    A rank whose own part needs nothing of the victim may succeed, and is told all the same.
    """
    work, buffers = OPERATIONS[operation](victim)
    stream_waits_for(work)
    error = failure_of(work.check) or wait_errored()
    raised = time.monotonic()
    keep_buffers(*buffers)
    freed = time.monotonic()
    no_violation()
    return error, raised, freed


def busy(operation: str, victim: int) -> tuple[ErrorInfo, float, float]:
    """The same, of an endless row of operations."""
    buffers: list[torch.Tensor] = []
    while backend().errored() is None:
        work, buffers = OPERATIONS[operation](victim)
        failure_of(work.check)
    raised = time.monotonic()
    keep_buffers(*buffers)
    freed = time.monotonic()
    no_violation()
    return describe(backend().errored()), raised, freed


def strike(world, case: Case) -> float:
    if case.strike == "abort":
        when = time.monotonic()
        world.side(case.victim, abort)
        return when
    when = time.monotonic()
    world.kill(case.victim) if case.strike == "kill" else world.freeze(case.victim)
    return when


def begin(world, case: Case, survivors: list[int]) -> list:
    if not case.busy:
        return [world.start_blocked(r, blocked, case.operation, case.victim) for r in survivors]
    calls = {r: world.start(r, busy, case.operation, case.victim) for r in range(case.size)}
    for rank in range(case.size):
        world.side(rank, several_more_operations)
    return [calls[rank] for rank in survivors]


def several_more_operations() -> None:
    import rankside

    rankside.wait_for_operation_after(rankside.operations() + 3)


def check_told(case: Case, error: ErrorInfo, pid: int) -> None:
    expected = "CommAbortedError" if case.strike == "abort" else "PeerLostError"
    assert error.type == expected, error.text
    assert error.cause["rank"] == case.victim, error.text
    if case.strike != "abort":
        assert error.cause["pid"] == pid, error.text


def lateness(devices, case: Case) -> list[float]:
    """Of the release of each survivor, beyond the heartbeat limit where the victim was stopped."""
    heartbeat = seconds(HEARTBEAT)
    world = devices.world(case.size, heartbeat=heartbeat)
    world.run(meet, case.operation, case.victim)
    survivors = [rank for rank in range(case.size) if rank != case.victim]
    pid = world.workers[case.victim].pid
    calls = begin(world, case, survivors)
    struck = strike(world, case)
    if case.strike == "kill":
        devices.start_spare()  # for the next case, while this one goes on
    outcomes = [call.value(NOTICE + HEARTBEAT) for call in calls]
    for error, _, _ in outcomes:
        check_told(case, error, pid)
    released = [raised - struck for _, raised, _ in outcomes]
    stream_free_s = max(freed for _, _, freed in outcomes) - struck
    record(str(case), released_s=max(released), stream_free_s=stream_free_s)
    go_on(devices, world, case, survivors)
    return [took - (HEARTBEAT if case.strike == "stop" else 0.0) for took in released]


def go_on(devices, world, case: Case, survivors: list[int]) -> None:
    """The survivors by themselves, and then all where the victim was thawed."""
    heartbeat = seconds(HEARTBEAT)
    after = devices.next(world, survivors, heartbeat=heartbeat)
    after.run(check_sum)
    if case.strike == "stop":
        world.thaw(case.victim)
    if case.strike != "kill":
        assert world.on(case.victim, wait_errored).type
    if case.strike == "stop":
        time.sleep(AFTER_THAW)
    after.run(buffers_are_unchanged)
    if case.strike == "stop":
        devices.next(world, range(case.size), heartbeat=heartbeat).run(check_sum)


@pytest.mark.parametrize("case", chosen(), ids=str)
def test_strike_is_told_to_survivors_who_go_on(devices, case):
    limit = BOUND if accelerator.nccl_simulated() else NOTICE
    assert_within(limit, lambda: lateness(devices, case))
