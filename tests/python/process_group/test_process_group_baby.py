"""Groups whose engine runs in a child process: what they give, and who learns of whose end."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from baby_side import HOST, await_gone, child_pid, times_of_a_kill
from process_group_side import (
    LIMIT,
    abort,
    exchanges,
    joined,
    leave,
    messages,
    own,
    results_of,
    scattered_sums,
    start_blocked,
    sums,
    whole_sum,
    world_of,
)
from ranks import World, values_of
from rankside import failure_of, kept, seconds, wait_until
from timing import AT_ONCE, assert_within
from torch.nn.parallel import DistributedDataParallel

from torchft_ext import process_group as pgs


def coalesced() -> list[torch.Tensor]:
    """Several tensors at once, none at all, and items that are only moved."""
    group, size = kept["group"], kept["group"].size()
    lists = [[torch.empty(4), torch.empty(4)] for _ in range(size)]
    group.allgather_coalesced(lists, [own(), own(1.0)]).wait()
    flat = [torch.empty(4 * size), torch.empty(4 * size)]
    group.allgather_into_tensor_coalesced(flat, [own(), own(2.0)]).wait()
    nothing = torch.empty(0)
    group.allreduce([nothing]).wait()
    largest, complexes = own().to(torch.bfloat16), own().to(torch.complex64)
    group.allreduce([largest], dist.ReduceOp.MAX).wait()
    group.broadcast_one(complexes, 0).wait()
    uneven_in, uneven_out = torch.arange(size + 1.0) + group.rank(), torch.empty(0)
    splits = [1] * (size - 1) + [2]  # the last rank gets one more of each
    received = [2] * size if group.rank() == size - 1 else [1] * size
    uneven_out = torch.empty(sum(received))
    group.alltoall_base(uneven_out, uneven_in, received, splits).wait()
    return [*itertools.chain(*lists), *flat, nothing, largest.float(), complexes.real, uneven_out]


@pytest.mark.parametrize("kind", ["BabyHost", "BabyGloo"])
def test_children_give_what_the_engine_in_the_process_gives(ranks, kind):
    results = []
    for chosen in ("Host", kind):
        world = world_of(ranks, 3, chosen)
        found = [
            world.run(results_of, operations)
            for operations in (sums, scattered_sums, exchanges, coalesced, messages)
        ]
        pair = joined(World(ranks, world.workers[:2]), chosen)
        found += [
            pair.run(results_of, operations)
            for operations in (sums, scattered_sums, exchanges, coalesced)
        ]
        world.run(leave)
        results.append(found)
    assert results[0] == results[1]


def has_ended(pid: int) -> bool:
    """Whether it runs no more; its parent may be still about to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(("victim", "kind"), [(0, HOST), (2, HOST), (0, "BabyGloo")])
def test_killed_child_releases_all_ranks_and_leaves_their_tensors(ranks, victim, kind):
    """Rank 0's child is in the operation, rank 2's is not."""

    def times() -> list[float]:
        world = world_of(ranks, 3, kind)
        pids = world.run(child_pid)
        calls = start_blocked(world, 2)
        took = times_of_a_kill(calls, victim, pids)
        assert [left for _, left in values_of(calls)] == [[0.0] * 4] * 2
        joined(world, kind)
        assert world.run(whole_sum) == [36.0 - 27.0 + 18.0 - 9.0 + 18.0 - 18.0 + 18.0] * 3
        await_gone(*pids)
        world.run(leave)
        return took

    assert_within(AT_ONCE, times)


def test_killed_parent_is_told_to_all_and_takes_its_child_along(ranks):
    def times() -> list[float]:
        world = world_of(ranks, 3, HOST)
        orphan = world.on(2, child_pid)
        calls = start_blocked(world, 2)
        killed = time.monotonic()
        world.kill(2)
        found = values_of(calls)
        assert [error.type for error, _ in found] == ["PeerLostError"] * 2
        wait_until(lambda: has_ended(orphan), "the end of the child")
        survivors = joined(World(ranks, world.workers[:2]), HOST)
        survivors.run(whole_sum)
        survivors.run(leave)
        return [error.at - killed for error, _ in found]

    assert_within(AT_ONCE, times)


def fork_who_stays() -> int:
    """A process that inherits what this one has open."""
    pid = os.fork()
    if pid == 0:
        time.sleep(LIMIT * 2)
        os._exit(0)
    return pid


def test_child_ends_with_its_parent_though_a_fork_of_that_lives(ranks):
    world = world_of(ranks, 2, HOST)
    child, fork = world.on(1, child_pid), world.on(1, fork_who_stays)
    try:
        world.kill(1)
        wait_until(lambda: has_ended(child), "the end of the child")
    finally:
        os.kill(fork, signal.SIGKILL)
    world.on(0, leave)


def fork_that_forgets() -> int:
    """A process that drops its copy of the group; its exit status."""
    gc.collect()  # the groups of earlier tests, over gloo too, are no business of the fork's
    pid = os.fork()
    if pid == 0:
        kept.clear()
        gc.collect()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_fork_that_drops_the_group_leaves_its_child_alone(ranks):
    world = world_of(ranks, 2, HOST)
    assert world.on(0, fork_that_forgets) == 0
    world.run(whole_sum)
    world.run(leave)


def stop_child() -> int:
    pid = kept["group"].child_pid()
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_abort_releases_all_though_a_child_is_stopped(ranks):
    def times() -> list[float]:
        world = world_of(ranks, 3, HOST)
        stopped = world.on(0, stop_child)
        calls = start_blocked(world, 2)
        began = world.side(2, abort)
        found = values_of(calls)
        assert [error.type for error, _ in found] == ["CommAbortedError"] * 2
        assert [left for _, left in found] == [[0.0] * 4] * 2
        await_gone(stopped)
        joined(world, HOST)
        world.run(whole_sum)
        world.run(leave)
        return [error.at - began for error, _ in found]

    assert_within(AT_ONCE, times)


def go_on(address: str, rank: int, size: int, count: int) -> list[float]:
    found = []
    for number in range(count):
        kept["group"].configure(f"{address}/{number}", rank, size)
        tensor = torch.ones(2**18)
        kept["group"].allreduce([tensor]).wait()
        found.append(tensor[-1].item())
    return found


def test_slower_members_complete_the_last_operation_of_those_that_went_on(ranks):
    world, address = world_of(ranks, 3, HOST), ranks.address()
    calls = [world.start(rank, go_on, address, rank, 3, 20) for rank in range(3)]
    assert values_of(calls) == [[3.0] * 20] * 3
    world.run(leave)


def train() -> float:
    model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=kept["group"])
    model(torch.full((1, 2), float(kept["group"].rank()))).sum().backward()
    return model.module.weight.grad[0, 0].item()


def test_ddp_averages_gradients_over_children(ranks):
    world = world_of(ranks, 2, HOST)
    assert world.run(train) == [0.5, 0.5]
    world.run(leave)


def blocked_for(limit: float) -> object:
    options = dist.AllreduceOptions()
    options.timeout = seconds(limit)
    return failure_of(lambda: kept["group"].allreduce([torch.ones(1)], options).wait())


def test_child_tells_that_the_time_is_over(ranks):
    world = world_of(ranks, 2, HOST)
    error = world.on(0, blocked_for, 0.3)
    assert (error.type, error.fields["limit"]) == ("CommTimeoutError", 0.3)
    world.run(leave)


def test_names_are_those_of_torchft():
    assert issubclass(pgs.ProcessGroupBabyHost, pgs.ProcessGroupBaby)
    assert issubclass(pgs.ProcessGroupBabyGloo, pgs.ProcessGroupBaby)
    group = pgs.ProcessGroupBabyHost(timeout=seconds(3))
    assert (group.getBackendName(), group.rank(), group.size()) == ("ft:baby-host", 0, 1)
    group.shutdown()
