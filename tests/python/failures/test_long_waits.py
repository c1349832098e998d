"""An operation that waits long: the log, the error and stats() name the rank that has not issued
it, and none that waits as well."""

from __future__ import annotations

import ctypes
import os
import re
import threading

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, World
from rankside import (
    OPERATION_LIMIT,
    ErrorInfo,
    all_stats,
    backend,
    failure_of,
    join,
    seconds,
    wait_until,
)
from values import check_sum

from torchft_ext import metrics

LIMIT = 3.0  # seconds, of the operation whose error is looked at
ASK_AFTER = 0.3  # seconds
# By name: TORCHFT_EXT_SHARED_MEMORY and local_sockets. A time of its own makes a group of its own.
WAYS = {"shared_memory": ("1", True), "unix": ("0", True), "tcp": ("0", False)}
SLEEPS = r"its main thread sleeps, for at least [12] s$"  # it is asked once a second
WHOM = r"it waited for rank 2 \(host \S+, pid (\d+)\): "

go_on = threading.Event()


def begin_over(address: str, rank: int, size: int, way: str) -> None:
    go_on.clear()
    shared_memory, local_sockets = WAYS[way]
    before = os.environ.get("TORCHFT_EXT_SHARED_MEMORY")
    os.environ["TORCHFT_EXT_SHARED_MEMORY"] = shared_memory
    ask_after = seconds(ASK_AFTER + 0.001 * list(WAYS).index(way))
    try:
        join(address, rank, size, ask_after=ask_after, local_sockets=local_sockets)
    finally:
        del os.environ["TORCHFT_EXT_SHARED_MEMORY"]
        if before is not None:
            os.environ["TORCHFT_EXT_SHARED_MEMORY"] = before
    check_sum()


def world_over(ranks: Pool, way: str = "shared_memory", size: int = 3) -> World:
    world, address = World(ranks, ranks.borrow(size)), ranks.address()
    for call in [world.start(rank, begin_over, address, rank, size, way) for rank in range(size)]:
        call.value()
    return world


def reduce_within(limit: float) -> ErrorInfo | None:
    backend().set_timeout(seconds(limit))
    return failure_of(lambda: dist.all_reduce(torch.ones(4)))


def told(world: World) -> str:
    """What rank 0's error says of those that it waited for, while rank 1 waits as well."""
    neighbour = world.start_blocked(1, reduce_within, OPERATION_LIMIT)
    error = world.on(0, reduce_within, LIMIT)
    assert error.type == "CommTimeoutError", error
    found = re.search(WHOM + r"(.*?)(, [\d.]+ s into the| \(timed out)", error.text)
    assert found is not None, error.text
    assert int(found.group(1)) == world.workers[2].pid
    assert not re.search(r"rank 1\b", error.text), error.text
    assert re.search(WHOM, neighbour.value().text)  # rank 0's failure, told to all
    return found.group(2)


def let_go() -> None:
    go_on.set()


def waits_for_an_event() -> None:
    assert go_on.wait(OPERATION_LIMIT)


def spins() -> None:
    while not go_on.is_set():
        pass


def sleeps_with_the_interpreters_lock() -> None:
    ctypes.PyDLL(None).sleep(int(LIMIT) + 2)  # PyDLL keeps it


def receives() -> None:
    failure_of(lambda: dist.recv(torch.ones(1), src=0))


@pytest.mark.parametrize("way", WAYS)
def test_rank_that_issued_one_fewer_is_named_with_its_last_operation(ranks, way):
    world = world_over(ranks, way)
    logged = len(world.workers[0].log())
    text = told(world)
    assert re.match(r"its last operation is \w+ #\d+, [\d.]+ s ago; its main thread ", text), text
    line = r"allreduce #\d+ on '0' \(rank 0/3, generation \d+\) has waited [\d.]+ s for rank 2 "
    assert len(re.findall(line, world.workers[0].log()[logged:])) == 1
    world.next().run(check_sum)


@pytest.mark.parametrize("way", WAYS)
def test_rank_that_issued_another_operation_is_named_with_that(ranks, way):
    world = world_over(ranks, way)
    other = world.start_blocked(2, receives)
    text = told(world)
    assert re.match(
        r"its last operation is recv #\d+, [\d.]+ s ago; its main thread waits in ", text
    )
    other.value()


def test_rank_in_user_code_is_said_to_sleep(ranks):
    world = world_over(ranks)
    call = world.start(2, waits_for_an_event)
    assert re.search(SLEEPS, told(world))
    world.side(2, let_go)
    call.value()


def test_rank_whose_main_thread_computes_is_said_to_run(ranks):
    world = world_over(ranks)
    call = world.start(2, spins)
    assert told(world).endswith("its main thread runs")
    world.side(2, let_go)
    call.value()


def test_rank_answers_while_its_interpreters_lock_is_held(ranks):
    world = world_over(ranks)
    call = world.start(2, sleeps_with_the_interpreters_lock)
    assert re.search(SLEEPS, told(world))
    call.value()


@pytest.mark.parametrize("way", WAYS)
def test_stopped_rank_is_said_not_to_answer(ranks, way):
    world = world_over(ranks, way)
    world.freeze(2)
    text = told(world)
    assert re.fullmatch(
        r"it has not answered for [\d.]+ s: it is stopped, or cannot be reached", text
    ), text


def waited_for() -> dict[int, float]:
    return all_stats()["waited_for"]


def reduces_late() -> None:
    wait_until(go_on.is_set, "rank 0's wait")
    check_sum()


def test_stats_count_the_seconds_that_a_rank_was_waited_for(ranks):
    world = world_over(ranks)
    calls = [world.start(2, reduces_late)]
    calls += [world.start_blocked(rank, check_sum) for rank in (0, 1)]
    for rank in (0, 1):
        world.side(rank, wait_until_waited_for, 2)
    world.side(2, let_go)
    for call in calls:
        call.value()
    for rank in (0, 1):
        assert list(world.on(rank, waited_for)) == [2]
        assert re.search(
            r'\ntorchft_ext_waited_seconds\{.*rank="2"\} [\d.]+\n', world.on(rank, metrics)
        )
    assert world.on(2, waited_for) == {}


def wait_until_waited_for(rank: int) -> None:
    wait_until(lambda: waited_for().get(rank, 0) >= ASK_AFTER, f"a wait for rank {rank}")


def barrier_within(limit: float) -> ErrorInfo | None:
    return failure_of(lambda: dist.monitored_barrier(None, seconds(limit), True))


def test_monitored_barrier_says_what_the_missing_rank_does(ranks):
    world = world_over(ranks)
    call = world.start(2, waits_for_an_event)
    neighbour = world.start(1, barrier_within, OPERATION_LIMIT)
    error = world.on(0, barrier_within, LIMIT)
    assert "Ranks 2 failed to pass monitoredBarrier in 3000 ms; rank 2 (host " in error.text
    assert re.search(
        r"\): its last operation is \w+ #\d+, [\d.]+ s ago; its main thread sleeps", error.text
    )
    assert not re.search(r"rank 1\b", error.text), error.text
    world.side(2, let_go)
    call.value()
    neighbour.value()
