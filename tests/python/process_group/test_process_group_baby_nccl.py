"""Groups for device tensors whose NCCL runs in a child process: device and NCCL are simulated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import baby_nccl_side as side
import pytest
import torch
import torch.distributed as dist
from baby_side import await_gone, child_pid, times_of_a_kill
from device_side import accelerator
from process_group_side import (
    LIMIT,
    abort,
    await_blocked,
    exchanges,
    results_of,
    scattered_sums,
    start_blocked,
    sums,
)
from process_group_side import leave as leave_host
from process_group_side import world_of as host_world_of
from ranks import START_PATIENCE, Pool, World, values_of
from rankside import seconds, wait_until
from test_process_group_baby import coalesced, has_ended
from timing import AT_ONCE, assert_within

from torchft_ext import _pg_baby as baby
from torchft_ext import _pg_frames as frames
from torchft_ext import process_group as pgs
from torchft_ext._pg_lent import LendingChild

pytestmark = pytest.mark.skipif(
    not accelerator.nccl_simulated(), reason="the child is the simulator's"
)


class Groups:
    """Worlds whose group is a ProcessGroupBabyNCCL."""

    def __init__(self, pool: Pool, violations: str) -> None:
        self.pool = pool
        self.violations = violations

    def world(self, size: int) -> World:
        return self.joined(World(self.pool, self.pool.borrow(size)))

    def joined(self, world: World) -> World:
        address = self.pool.address()
        calls = [
            world.start(rank, side.join, self.violations, "BabyNCCL", address, rank, world.size)
            for rank in range(world.size)
        ]
        values_of(calls, START_PATIENCE)
        return world

    def leave(self, world: World) -> None:
        world.run(side.leave, self.violations)

    def alone(self, faults: str = "") -> World:
        world = World(self.pool, self.pool.borrow(1))
        world.on(0, side.begin_alone, self.violations, self.pool.address(), faults)
        return world

    def found_alone(self, function: Callable[..., Any], *arguments: object) -> Any:
        """What a function finds in a world of one, which then leaves."""
        world = self.alone()
        found = world.on(0, function, *arguments)
        self.leave(world)
        return found


@pytest.fixture
def groups(devices, tmp_path) -> Iterator[Groups]:
    return Groups(devices.pool, str(tmp_path / "violations"))


def test_results_are_those_of_the_cpu_engine(groups):
    operations = (sums, scattered_sums, exchanges, coalesced)
    host = host_world_of(groups.pool, 3, "Host")
    expected = [host.run(results_of, each) for each in operations]
    host.run(leave_host)
    world = groups.joined(host)
    assert [world.run(side.on_device, each) for each in operations] == expected
    groups.leave(world)


def test_ddp_and_functional_collectives_run_over_children(groups):
    world = groups.world(2)
    assert world.run(side.train) == [[0.5, 0.5]] * 2
    assert world.run(side.functional_sum) == [[10.0, 12.0]] * 2
    groups.leave(world)


def test_parts_of_allocations_messages_and_many_operations_at_once(groups):
    world = groups.world(2)
    both = [0.0, 1.0, 2 * 2 + 10, 2 * 3 + 10, 2 * 4 + 10, 5.0, 6.0, 7.0]
    (whole, matrix, transposed), _ = world.run(side.parts_of_tensors)
    assert whole == both
    assert matrix == [0.0, 2 * 1 + 10, 2.0, 2 * 3 + 10, 4.0, 2 * 5 + 10, 6.0, 2 * 7 + 10]
    assert transposed == [2.0 * one + 10 for one in range(6)]
    assert world.run(side.messages) == [[10.0 + one for one in range(8)], [*map(float, range(8))]]
    assert world.run(side.several_under_way) == [[10.0 + 2 * one for one in range(20)]] * 2
    groups.leave(world)


def test_operation_waits_for_the_stream_and_the_stream_for_nothing(groups):
    world = groups.world(2)
    address = groups.pool.address()
    values_of([world.start(rank, side.join_probe, address, rank, 2) for rank in range(2)])
    assert world.run(side.sum_of_what_the_stream_writes_later) == [(False, 3.0, 6.0)] * 2
    world.run(side.leave_probe)
    groups.leave(world)


def test_memory_that_was_freed_and_allocated_again_is_another(groups):
    world = groups.world(2)
    results = world.run(side.sums_over_memory_that_was_freed, 8)
    assert [found for found, _ in results] == [[2.0 * number for number in range(8)]] * 2
    assert all(reused > 0 for _, reused in results)
    groups.leave(world)


@pytest.mark.parametrize("before", ["nothing", "a sum"])
def test_abort_releases_all_ranks_of_an_operation(groups, before):
    """Whether their children are in the operation, or in the making of a communicator for it."""

    def times() -> list[float]:
        world = groups.world(3)
        if before == "a sum":
            world.run(side.whole_sum)
        calls = start_blocked(world, 2, side.blocked_sum)
        began = world.side(2, abort)
        found = values_of(calls)
        assert [error.type for error, _ in found] == ["CommAbortedError"] * 2
        await_gone(*(pid for _, pid in found))
        groups.joined(world)
        assert world.run(side.whole_sum) == [30.0] * 3
        groups.leave(world)
        return [error.at - began for error, _ in found]

    assert_within(AT_ONCE, times)


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_child_releases_all_ranks_and_is_named(groups, victim):
    """Rank 0's child is in the operation, rank 2's is not."""

    def times() -> list[float]:
        world = groups.world(3)
        world.run(side.whole_sum)
        pids = world.run(child_pid)
        took = times_of_a_kill(start_blocked(world, 2, side.blocked_sum), victim, pids)
        groups.joined(world)
        assert world.run(side.whole_sum) == [30.0] * 3
        await_gone(*pids)
        groups.leave(world)
        return took

    assert_within(AT_ONCE, times)


def test_killed_parent_takes_its_child_along_out_of_an_operation(groups):
    world = groups.world(3)
    orphan = world.on(1, child_pid)
    calls = start_blocked(world, 2, side.blocked_sum)
    world.kill(1)
    error, _ = calls[0].value()
    assert error.type == "PeerLostError"
    wait_until(lambda: has_ended(orphan), "the end of the child")
    groups.leave(groups.joined(World(groups.pool, [world.workers[0], world.workers[2]])))


# ---- one rank ----


def test_child_whose_thread_sits_in_nccl_ends_with_its_parent(groups):
    world = groups.alone("block init ms=-1")
    orphan = world.on(0, child_pid)
    world.start(0, side.blocked_sum)
    world.side(0, await_blocked)
    world.kill(0)
    wait_until(lambda: has_ended(orphan), "the end of the child", LIMIT / 2)


def test_generations_leave_nothing_behind(groups):
    assert groups.found_alone(side.grown_by_generations, groups.pool.address()) == {}


@pytest.mark.parametrize("tells", [False, True])
def test_memory_of_a_failed_operation_is_kept_until_its_child_is_gone(groups, tells):
    found = groups.found_alone(side.memory_kept_for_a_child, groups.pool.address(), tells)
    assert found == (True, True)


def test_child_hears_of_no_operation_after_the_generation_failed(groups):
    assert groups.found_alone(side.sent_after_the_failure) == 0


def test_abort_and_configure_tell_of_a_killed_child_that_stays(groups):
    errors, began = groups.found_alone(side.errors_of_a_child_that_stays, groups.pool.address())
    assert ["has not ended within" in one for one in errors] == [True, True]
    assert not began


def test_capture_is_refused(groups):
    errors = groups.found_alone(side.errors_in_a_capture)
    assert ["cannot be part of a graph" in one for one in errors] == [True, True]


def test_refused_call_leaves_no_trace_of_its_memory(groups):
    assert groups.found_alone(side.sums_after_a_refusal) == 0.0


def test_copies_leave_the_current_device(groups):
    assert groups.found_alone(side.device_after_a_copy) == 0


def test_child_has_a_bounded_number_of_allocations_open(groups):
    found, count = groups.found_alone(side.open_in_child, 2)
    assert found == [*map(float, range(6))]
    assert 0 < count <= 2


def test_configure_takes_the_spare(groups):
    world = groups.alone()
    spare = world.on(0, side.await_spare)
    groups.joined(world)
    assert world.on(0, child_pid) == spare
    groups.leave(world)


def test_bad_arguments_are_told_and_leave_the_generation(groups):
    for text, words in zip(
        groups.found_alone(side.refusals),
        [
            f"expected tensors on {accelerator.NAME}, found one on cpu",
            "expected tensors on one device",
            "NCCL cannot reduce this dtype",
            "NCCL needs to know the source",
            "expected device memory that can be lent",
        ],
        strict=True,
    ):
        assert words in text


# ---- the program itself, in this process ----


def test_child_of_an_attempt_left_behind_is_not_the_generations():
    children = baby._Children(nccl_child)
    wanted = children.take()
    children.adopt(wanted)
    late = children.take()
    assert children.last() is wanted
    children.kill_making()
    await_gone(late.pid)
    assert not wanted.was_killed()
    assert children.killed_and_there(LIMIT) is None
    children.close()
    await_gone(wanted.pid)


def nccl_child() -> LendingChild:
    return LendingChild([str(baby._NCCL_CHILD)], dict(os.environ))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_without_cuda_the_group_says_what_to_use_instead():
    with pytest.raises(NotImplementedError, match=r"built without CUDA; use ProcessGroupBabyHost"):
        pgs.ProcessGroupBabyNCCL(timeout=LIMIT)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_child_is_small_and_says_that_it_has_no_cuda():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    child = nccl_child()
    wait_until(child.is_ready, "the child")
    status = Path(f"/proc/{child.pid}/status").read_text()
    (resident,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    assert int(resident) < 24 * 1024
    told = frames.Configure(0, 1, 9, 0, True, 1, "group", "127.0.0.1", "", "host", "prefix")
    with pytest.raises(RuntimeError, match="this torch was built without CUDA"):
        child.configure(told, store, seconds(LIMIT))
    child.kill()
    await_gone(child.pid)


def test_place_of_a_library_is_the_file_that_is_loaded():
    assert Path(baby._place_of("libc10.so")).is_file()
    assert baby._place_of("libnothing.so") is None


@pytest.mark.parametrize(
    "nonsense",
    [
        frames.LentMemory(1 << 40, 4096, 0, b"handle").frame(),  # before configure
        frames.ordered(1, 0, b"handle"),
        frames.framed(frames.Kind.MEMORY, b"short"),
    ],
)
def test_child_that_hears_nonsense_ends(nonsense):
    child = nccl_child()
    wait_until(child.is_ready, "the child")
    child._send(nonsense)
    wait_until(child.has_ended, "its end")
    assert "exited with status 3" in child._ended
