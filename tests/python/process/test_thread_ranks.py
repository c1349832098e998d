"""Threads of one process as ranks, alone and beside threads of other processes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from ranks import Died, Pool, World, values_of
from rankside import (
    OPERATION_LIMIT,
    ErrorInfo,
    connected_store,
    failure_of,
    leave_default_group,
    seconds,
    wait_until,
)
from timing import AT_ONCE, assert_within

import torchft_ext
from torchft_ext import process_group as pgs

Group = dist.ProcessGroup
mine: list[Group] = []  # this process's ranks, in order


def each(action: Callable[[int], object], count: int) -> list:
    """What `action` gives for each number, all at once on a thread each."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(action, range(count)))


def join(address: str, first: int, count: int, size: int) -> list[tuple[int, int]]:
    """This process becomes the ranks from `first` on."""
    leave_default_group()
    mine[:] = [pgs.ProcessGroupHost(timeout=OPERATION_LIMIT) for _ in range(count)]
    each(lambda i: mine[i].configure(address, first + i, size), count)
    return [(group.rank(), group.size()) for group in mine]


def make(address: str, size: int) -> list[tuple[int, int]]:
    """The same by the constructor that needs no configure(); each rank has a client of its own."""
    leave_default_group()

    def made(rank: int) -> Group:
        return torchft_ext.make_group(
            connected_store(address), rank, size, name="threads", timeout=seconds(OPERATION_LIMIT)
        )

    mine[:] = each(made, size)
    return [(group.rank(), group.size()) for group in mine]


def leave() -> None:
    each(lambda i: mine[i].shutdown(), len(mine))
    mine.clear()


def alone(ranks: Pool) -> World:
    return World(ranks, ranks.borrow(1))


def every_collective(group: Group) -> list[list[float]]:
    """One rank's part in one of each kind."""
    rank, size = group.rank(), group.size()
    own = torch.full((1,), rank + 1.0)

    def parts(first: float = 0.0) -> list[torch.Tensor]:
        return [torch.full((1,), first + to) for to in range(size)]

    summed, reduced, sent = own.clone(), own.clone(), own.clone()
    group.allreduce([summed]).wait()
    options = dist.ReduceOptions()
    options.rootRank = size - 1
    group.reduce([reduced], options).wait()
    cast = dist.BroadcastOptions()
    cast.rootRank = 1
    group.broadcast([sent], cast).wait()
    gathered, exchanged = parts(), parts()
    group.allgather([gathered], [own]).wait()
    group.alltoall(exchanged, parts(10.0 * rank)).wait()
    scattered, share = torch.empty(1), torch.empty(1)
    group.reduce_scatter([scattered], [parts()]).wait()
    scatter = dist.ScatterOptions()
    scatter.rootRank = 0
    group.scatter([share], [parts(5.0)] if rank == 0 else [], scatter).wait()
    collected = parts()
    gather = dist.GatherOptions()
    gather.rootRank = 0
    group.gather([collected] if rank == 0 else [], [own], gather).wait()
    passed = torch.empty(1)
    out = group.send([own], (rank + 1) % size, 3)
    group.recv([passed], (rank - 1) % size, 3).wait()
    out.wait()
    group.barrier().wait()
    at_last = reduced if rank == size - 1 else own
    at_first = collected if rank == 0 else [own]
    results = [summed, at_last, sent, gathered, exchanged, scattered, share, at_first, passed]
    return [torch.cat(x).tolist() if isinstance(x, list) else x.tolist() for x in results]


def everybodys_collectives() -> list[list[list[float]]]:
    return each(lambda i: every_collective(mine[i]), len(mine))


def expected(rank: int, size: int) -> list[list[float]]:
    numbers = [float(number) for number in range(1, size + 1)]
    return [
        [sum(numbers)],
        [sum(numbers) if rank == size - 1 else rank + 1.0],
        [2.0],
        numbers,
        [10.0 * number + rank for number in range(size)],
        [float(rank * size)],
        [5.0 + rank],
        numbers if rank == 0 else [rank + 1.0],
        [(rank - 1) % size + 1.0],
    ]


@pytest.mark.parametrize("constructor", ["configure", "make_group"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_threads_of_one_process_are_ranks(ranks, size, constructor):
    world, address = alone(ranks), ranks.address()
    by = (join, address, 0, size, size) if constructor == "configure" else (make, address, size)
    assert world.on(0, *by) == [(rank, size) for rank in range(size)]
    assert world.on(0, everybodys_collectives) == [expected(rank, size) for rank in range(size)]
    world.on(0, leave)


def smaller_and_smaller(address: str, size: int) -> list[list[float]]:
    """The last rank stays out of each generation; the others go on, in another order."""
    sums = []
    for left in range(size - 1, 0, -1):
        mine.pop(0).shutdown()

        def summed(i: int, left: int = left) -> float:
            mine[i].configure(f"{address}/{left}", left - 1 - i, left)
            tensor = torch.full((1,), mine[i].rank() + 1.0)
            mine[i].allreduce([tensor]).wait()
            return tensor.item()

        sums.append(each(summed, left))
    return sums


def test_threads_go_on_as_fewer_ranks(ranks):
    world = alone(ranks)
    world.on(0, join, ranks.address(), 0, 4, 4)
    sums = world.on(0, smaller_and_smaller, ranks.address(), 4)
    assert sums == [[6.0] * 3, [3.0] * 2, [1.0]]
    world.on(0, leave)


def abandon(group: Group) -> None:
    mine.remove(group)


ENDS: dict[str, tuple[Callable[[Group], object], str]] = {
    "abort": (lambda group: group.abort(), "CommAbortedError"),
    "shutdown": (lambda group: group.shutdown(), "PeerLeftError"),
    "abandon": (abandon, "PeerLeftError"),  # nothing is under way there
}


def ended(how: str, size: int) -> list[ErrorInfo | None]:
    """What the others hear that wait for rank 1 when it ends."""
    waiting = [group.allreduce([torch.ones(1)]) for group in mine if group.rank() != 1]
    ENDS[how][0](next(group for group in mine if group.rank() == 1))
    gc.collect()
    return [failure_of(work.wait) for work in waiting]


@pytest.mark.parametrize("how", sorted(ENDS))
def test_end_of_one_thread_rank_is_told_to_the_others(ranks, how):
    world = alone(ranks)
    world.on(0, join, ranks.address(), 0, 3, 3)
    for error in world.on(0, ended, how, 3):
        assert (error.type, error.cause["rank"]) == (ENDS[how][1], 1), error.text
    world.on(0, leave)


def failures_of_sums() -> list[ErrorInfo | None]:
    return each(lambda i: failure_of(lambda: mine[i].allreduce([torch.ones(1)]).wait()), len(mine))


def released_by_a_kill(ranks: Pool) -> list[float]:
    """Two processes of two ranks, of which one is killed; seconds until each survivor's error."""
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    values_of([world.start(i, join, address, 2 * i, 2, 4) for i in range(2)])
    waiting = world.start(0, failures_of_sums)
    died = world.start(1, time.sleep, OPERATION_LIMIT)
    began = time.monotonic()
    world.kill(1)
    with pytest.raises(Died):
        died.value()
    errors = waiting.value()
    for error in errors:
        assert error.type == "PeerLostError", error.text
        lost = error.cause["rank"]
        assert lost in (2, 3)
        assert f"; rank {5 - lost} was the same process" in error.text
    calls = world.start(0, go_on_as_two, ranks.address())
    assert calls.value() == [3.0, 3.0]
    world.on(0, leave)
    return [error.at - began for error in errors]


def go_on_as_two(address: str) -> list[float]:
    def summed(i: int) -> float:
        mine[i].configure(address, i, 2)
        tensor = torch.full((1,), i + 1.0)
        mine[i].allreduce([tensor]).wait()
        return tensor.item()

    return each(summed, 2)


def test_kill_of_a_process_is_the_loss_of_all_its_ranks(ranks):
    assert_within(AT_ONCE, lambda: released_by_a_kill(ranks))


def engines_and_descriptors() -> tuple[int, int]:
    stats = torchft_ext.backend(mine[0]).stats()
    return stats["threads"].count("ft-loop"), stats["descriptors"]


def engines_beside_one(address: str) -> int:
    """How many more with three ranks than with one; after that, it is as with one again."""
    join(f"{address}/one", 0, 1, 1)
    (first,) = mine
    one, descriptors = engines_and_descriptors()

    def ended() -> bool:
        engines, open_now = engines_and_descriptors()
        return engines == one and open_now <= descriptors

    for number in range(5):
        join(f"{address}/{number}", 0, 3, 3)
        three, _ = engines_and_descriptors()
        everybodys_collectives()
        leave()
        mine[:] = [first]
        wait_until(ended, "the members' end")
    leave()
    return three - one


def test_members_leave_no_thread_and_no_descriptor(ranks):
    assert alone(ranks).on(0, engines_beside_one, ranks.address()) == 2


def sums_in_torchs_threaded_world(size: int) -> list[list[float]]:
    """By init_process_group() and new_group(), as torch's MultiThreadedTestCase has threads."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    leave_default_group()
    store = dist.HashStore()
    world = threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)

    def run(rank: int) -> list[float]:
        dist.init_process_group(
            "ft", rank=rank, world_size=size, store=store, timeout=seconds(OPERATION_LIMIT)
        )
        ends = dist.new_group([0, size - 1])
        numbers = [torch.full((1,), rank + 1.0) for _ in range(2)]
        dist.all_reduce(numbers[0])
        if rank in (0, size - 1):
            dist.all_reduce(numbers[1], group=ends)
            assert dist.get_process_group_ranks(ends) == [0, size - 1]
        dist.barrier()
        if hasattr(dist.distributed_c10d._world, "comms"):
            dist.destroy_process_group()
        else:  # torch 2.11 cannot in its threaded world
            torchft_ext.backend().shutdown()
        return [number.item() for number in numbers]

    try:
        return each(run, size)
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
        del world


def test_threads_initialize_in_torchs_threaded_world(ranks):
    sums = alone(ranks).on(0, sums_in_torchs_threaded_world, 3)
    assert sums == [[6.0, 4.0], [6.0, 2.0], [6.0, 4.0]]
