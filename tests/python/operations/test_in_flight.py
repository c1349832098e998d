"""Every operation with async_op=True, all of them in flight at once, waited for in any order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from values import check, me, pattern, reduced_patterns

import torchft_ext

# Items: none of the steps of one operation are those of another, and some are long.
SIZES = (3, 1031, 40_009)
DTYPES = (torch.float32, torch.int64, torch.bool)

Issued = tuple[dist.Work, Callable[[], None]]  # and what checks the result once it was waited for


def issue_to_one(root: int, dtype: torch.dtype, size: int) -> list[Issued]:
    """reduce, gather, and scatter with this root."""
    rank, world = me()
    op = "MAX" if dtype == torch.bool else "SUM"
    total = pattern(rank, size, dtype)
    outputs = [torch.zeros(size, dtype=dtype) for _ in range(world)] if rank == root else None
    parts = [pattern(to, size, dtype, salt=1) for to in range(world)] if rank == root else None
    part = torch.zeros(size, dtype=dtype)

    def check_total() -> None:
        if rank == root:
            check(total, reduced_patterns(op, world, size, dtype), ("reduce", root, dtype, size))

    def check_outputs() -> None:
        for source, output in enumerate(outputs or []):
            check(output, pattern(source, size, dtype), ("gather", root, source, dtype, size))

    def check_part() -> None:
        check(part, pattern(rank, size, dtype, salt=1), ("scatter", root, dtype, size))

    to_all = getattr(dist.ReduceOp, op)
    return [
        (dist.reduce(total, root, to_all, async_op=True), check_total),
        (dist.gather(pattern(rank, size, dtype), outputs, root, async_op=True), check_outputs),
        (dist.scatter(part, parts, root, async_op=True), check_part),
    ]


def issue_to_all(dtype: torch.dtype, size: int) -> list[Issued]:
    """allreduce, both forms of reduce_scatter, allgather and alltoall."""
    rank, world = me()
    op = "MAX" if dtype == torch.bool else "SUM"
    reduction = getattr(dist.ReduceOp, op)
    everyone = range(world)
    total = pattern(rank, size, dtype)
    mine = [pattern(rank, size, dtype, salt=to) for to in everyone]
    slices = [torch.zeros(size, dtype=dtype) for _ in range(2)]
    gathered = [torch.zeros(size, dtype=dtype) for _ in everyone]
    flat = torch.zeros(size * world, dtype=dtype)
    swapped = [torch.zeros(size, dtype=dtype) for _ in everyone]
    flat_swapped = torch.zeros(size * world, dtype=dtype)

    def check_total() -> None:
        check(total, reduced_patterns(op, world, size, dtype), ("all_reduce", dtype, size))

    def check_slice(found: torch.Tensor) -> None:
        expected = reduced_patterns(op, world, size, dtype, salt=rank)
        check(found, expected, ("reduce_scatter", dtype, size))

    def check_gathered(found: torch.Tensor) -> None:
        expected = torch.cat([pattern(source, size, dtype) for source in everyone])
        check(found, expected, ("all_gather", dtype, size))

    def check_swapped(found: torch.Tensor) -> None:
        expected = torch.cat([pattern(source, size, dtype, salt=rank) for source in everyone])
        check(found, expected, ("all_to_all", dtype, size))

    flat_input = torch.cat(mine)
    return [
        (dist.all_reduce(total, reduction, async_op=True), check_total),
        (
            dist.reduce_scatter(slices[0], mine, reduction, async_op=True),
            lambda: check_slice(slices[0]),
        ),
        (
            dist.reduce_scatter_tensor(slices[1], flat_input, reduction, async_op=True),
            lambda: check_slice(slices[1]),
        ),
        (
            dist.all_gather(gathered, pattern(rank, size, dtype), async_op=True),
            lambda: check_gathered(torch.cat(gathered)),
        ),
        (
            dist.all_gather_into_tensor(flat, pattern(rank, size, dtype), async_op=True),
            lambda: check_gathered(flat),
        ),
        (
            dist.all_to_all(swapped, mine, async_op=True),
            lambda: check_swapped(torch.cat(swapped)),
        ),
        (
            dist.all_to_all_single(flat_swapped, flat_input, async_op=True),
            lambda: check_swapped(flat_swapped),
        ),
    ]


def issue_messages(size: int, tag: int) -> list[Issued]:
    """To the next rank, and from the one before."""
    rank, world = me()
    if world == 1:
        return []
    before = (rank - 1) % world
    received = torch.zeros(size)
    return [
        (
            dist.irecv(received, before, tag=tag),
            lambda: check(received, pattern(before, size, torch.float32), ("irecv", size)),
        ),
        (dist.isend(pattern(rank, size, torch.float32), (rank + 1) % world, tag=tag), lambda: None),
    ]


def issue_broadcast(root: int, dtype: torch.dtype, size: int) -> Issued:
    tensor = pattern(me()[0], size, dtype)
    work = dist.broadcast(tensor, root, async_op=True)
    return work, lambda: check(tensor, pattern(root, size, dtype), ("broadcast", root, dtype, size))


def everything_in_flight(seed: int) -> None:
    rank, world = me()
    issued: list[Issued] = []
    for tag, size in enumerate(SIZES):
        for dtype in DTYPES:
            for root in range(world):
                issued.append(issue_broadcast(root, dtype, size))
                issued += issue_to_one(root, dtype, size)
            issued += issue_to_all(dtype, size)
        issued += issue_messages(size, tag)
        issued.append((dist.barrier(async_op=True), lambda: None))
    random.Random(seed * 100 + rank).shuffle(issued)  # on each rank in an order of its own
    for work, check_result in issued:
        assert work.wait()
        check_result()


@pytest.mark.parametrize("size", (1, 2, 3, 5))
def test_every_operation_can_be_in_flight_beside_every_other(ranks, size):
    ranks.world(size).run(everything_in_flight, size)


def make_groups() -> list[dist.ProcessGroup]:
    """Of which this rank is a member: of all pairs, all triples, and twice of all four."""
    everyone = range(4)
    members = [*itertools.combinations(everyone, 2), *itertools.combinations(everyone, 3)]
    groups = [dist.new_group(list(some)) for some in (*members, everyone, everyone)]
    return [group for group in groups if isinstance(group, dist.ProcessGroup)]


def many_groups_in_flight() -> int:
    rank, _ = me()
    groups = make_groups()
    issued = []
    for round_ in range(3):
        for number, group in enumerate(groups):
            tensor = torch.full((1 + 9_001 * round_,), rank + 1.0)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            issued.append((work, tensor, group, number))
    random.Random(rank).shuffle(issued)
    for work, tensor, group, number in issued:
        work.wait()
        total = sum(member + 1.0 for member in dist.get_process_group_ranks(group))
        check(tensor, torch.full_like(tensor, total), number)
    dist.barrier()  # nobody aborts what another has yet to complete
    for group in groups:
        if dist.get_process_group_ranks(group) == [0, 1]:
            torchft_ext.backend(group).abort("one of them")
        else:
            dist.barrier(group)
    for group in groups:
        dist.destroy_process_group(group)
    return len(groups)


def test_many_groups_are_in_flight_at_once_and_one_ends_alone(ranks):
    assert ranks.fresh(4).run(many_groups_in_flight) == [8] * 4
