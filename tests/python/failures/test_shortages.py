"""A rank that has no descriptor, thread, memory or port left says so at once, with numbers. The
others hear it from that rank, and what was made works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from namespaces import in_namespaces
from ranks import Call, Pool, World
from rankside import ErrorInfo
from shortages import (
    GROUP_LIMIT,
    allocate,
    end_shortage,
    leave_descriptors,
    leave_memory,
    leave_no_threads,
    leave_small_files,
    make_baby,
    make_default_group,
    make_group,
    make_groups,
    reduce_it_in_a_callback,
    reduce_what_is_allocated,
    use_shared_memory,
)
from values import check_sum

KINDS = ("RuntimeError",)
TOLD_WITHIN = GROUP_LIMIT / 2  # seconds; it takes one or two
MANY = 1 << 26  # floats: too many for what is left


def assert_all_hear_of(victim: int, calls: list[Call], words: str) -> ErrorInfo:
    """The victim's own error."""
    errors = [call.error(*KINDS) for call in calls]
    began = min(error.at for error in errors)
    for rank, error in enumerate(errors):
        assert words in error.text, f"rank {rank}: {error.text}"
        assert error.at - began < TOLD_WITHIN
        if rank != victim:
            assert error.cause is not None and error.cause["rank"] == victim, error.text
            assert error.fields["elapsed"] < TOLD_WITHIN, error.text
    return errors[victim]


@contextmanager
def shortage(world: World, victim: int, begin: Callable, *args: object) -> Iterator[object]:
    """What `begin` returned in the rank, whose shortage ends with the block."""
    world.run(check_sum)  # what that imports is there from now on
    value = world.on(victim, begin, *args)
    try:
        yield value
    finally:
        world.on(victim, end_shortage)


@pytest.mark.parametrize("left", [0, 1, 3])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_rank_without_descriptors_says_so_and_how_many_are_open(ranks: Pool, victim, left):
    world = ranks.fresh(3)
    with shortage(world, victim, leave_descriptors, left) as limit:
        own = assert_all_hear_of(victim, world.start_all(make_groups), "Too many open files")
        assert f"{limit} are open, the limit is {limit}" in own.text
        world.run(check_sum)
    world.run(make_group)


def default_groups(world: World, address: str) -> list[Call]:
    size = world.size
    return [world.start(rank, make_default_group, address, rank, size) for rank in range(size)]


@pytest.mark.parametrize("victim", [0, 2])
def test_rank_without_a_thread_for_its_store_says_so(ranks: Pool, victim):
    # A server of its own: a group that is about to end may still have the thread for the other one.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{store.port}"
    world = ranks.fresh(3)
    with shortage(world, victim, leave_no_threads):
        calls = default_groups(world, f"{address}/short")
        own = assert_all_hear_of(victim, calls, "cannot start thread ft-store")
        assert "threads run in this process" in own.text
    for call in default_groups(world, f"{address}/enough"):
        call.value()


@pytest.mark.parametrize("victim", [0, 2])
def test_rank_without_a_thread_for_its_engine_says_so(ranks: Pool, victim):
    world = ranks.fresh(3)
    with shortage(world, victim, leave_no_threads):
        calls = world.start_all(make_group, port_range=f"{20000 + victim}-30000")
        assert_all_hear_of(victim, calls, "cannot start thread ft-loop")
        world.run(check_sum)
    world.run(make_group)


@pytest.mark.parametrize(
    ("reduce", "left"),
    [
        (reduce_what_is_allocated, 16 << 20),
        (reduce_it_in_a_callback, 192 << 20),  # another thread for callbacks, not the copy
    ],
)
def test_rank_without_memory_for_buffers_says_so_and_is_not_called_a_fault_of_ours(
    ranks: Pool, reduce, left
):
    # In shared memory a sum needs no buffers.
    few = World(ranks, ranks.borrow(2))
    few.run(use_shared_memory, False)
    world = ranks.fresh(2)
    few.run(use_shared_memory, True)
    world.run(allocate, MANY)
    with shortage(world, 1, leave_memory, left):
        calls = world.start_all(reduce)
        own = assert_all_hear_of(1, calls, "ran out of memory")
        assert "please report it" not in own.text
    world.next().run(check_sum)


@pytest.mark.parametrize(
    ("begin", "left", "named"),
    [
        (
            leave_small_files,
            1 << 20,
            "no file size left (the limit is 1 MiB: raise it with ulimit -f",
        ),
        (leave_memory, 64 << 20, "MiB: raise it with ulimit -v"),
    ],
)
def test_child_without_shared_memory_names_the_limit_that_was_hit(ranks: Pool, begin, left, named):
    world = ranks.fresh(1)
    with shortage(world, 0, begin, left):
        text = world.start(0, make_baby).error("MemoryError").text
        assert named in text and "256 MiB that a child process shares" in text
    world.run(make_baby)


def test_rank_without_ports_says_so(tmp_path):
    told = in_namespaces("port_shortage", tmp_path)
    for rank, text in enumerate(told["errors"]):
        assert "Cannot assign requested address" in text, f"rank {rank}: {text}"
        assert "no local port from 40000 to 40000 is left" in text
    assert "rank 1 (host" in told["errors"][0]
    assert max(told["elapsed"]) < TOLD_WITHIN
    assert told["works_on"]
