"""What a Work tells of its operation, as torch's own backends do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rankside import OPERATION_LIMIT, backend, seconds
from values import check, me, pattern


def number_of_a_failure(before: int) -> tuple[object, object]:
    for _ in range(before):
        dist.barrier()
    work = dist.all_reduce(torch.ones(3 + me()[0]), async_op=True)
    with pytest.raises(dist.DistBackendError) as caught:
        work.wait()
    number = work._get_sequence_number() if hasattr(work, "_get_sequence_number") else None
    return caught.value.seq, number


@pytest.mark.parametrize("before", (0, 2))
def test_operations_of_a_generation_are_numbered_from_one(ranks, before):
    for seq, number in ranks.world(2).next().run(number_of_a_failure, before):
        assert seq == before + 1
        assert number in (seq, None)  # torch 2.14 tells it of a Work too


def receive_from_named() -> int:
    rank, _ = me()
    if rank == 1:
        dist.send(torch.ones(3), 0)
        return 1
    work = dist.irecv(torch.zeros(3), 1)
    work.wait()
    return work._source_rank()


def test_receive_from_a_named_rank_tells_its_source(ranks):
    assert ranks.world(2).run(receive_from_named) == [1, 1]


def durations() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    assert 0 < work._get_duration() < OPERATION_LIMIT * 1000
    if me()[0] == 1:
        dist.barrier()
        dist.send(torch.ones(3), 0)
        return
    pending = dist.irecv(torch.zeros(3), 1)
    with pytest.raises(RuntimeError, match="has not completed"):
        pending._get_duration()
    dist.barrier()
    pending.wait()
    first = pending._get_duration()
    assert pending._get_duration() == first, "it grows no more"


def test_duration_of_an_operation_on_the_host_is_that_from_issue_to_completion(ranks):
    ranks.world(2).run(durations)


def limits() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work.timeout == seconds(OPERATION_LIMIT)
    work.wait()
    options = dist.AllreduceOptions()
    options.timeout = seconds(7)
    work = backend().allreduce([torch.ones(3)], options)
    assert work.timeout == seconds(7)
    work.wait()


@pytest.mark.skipif(not hasattr(dist.Work, "timeout"), reason="torch 2.14 has it")
def test_work_tells_its_limit(ranks):
    ranks.world(2).run(limits)


def gather_into_one() -> None:
    rank, world = me()
    for root, rows in ((0, 0), (world - 1, 5)):
        given = pattern(rank, 3 * rows, torch.float32).view(rows, 3)
        for shape in ((world * rows, 3), (world, rows, 3)):
            output = torch.zeros(shape) if rank == root else None
            dist.gather_single(given, output, dst=root)
            if output is not None:
                everyone = [pattern(r, 3 * rows, torch.float32) for r in range(world)]
                check(output.flatten(), torch.cat(everyone), (root, shape))
    output = torch.zeros(world, 2) if rank == 0 else torch.zeros(0)
    dist.group.WORLD.gather_into_tensor(output, torch.full((2,), float(rank))).wait()
    if rank == 0:
        check(output[:, 0], torch.arange(world, dtype=torch.float32), "by its old name")
        with pytest.raises(ValueError, match="gather_single: output: expected"):
            dist.gather_single(torch.ones(3), torch.zeros(1))


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="torch 2.14 has it")
@pytest.mark.parametrize("size", (1, 3))
def test_gather_into_one_tensor_gives_all_inputs(ranks, size):
    ranks.world(size).run(gather_into_one)


def names_of_torch_2_14() -> None:
    rank, world = me()
    flat = torch.zeros(2 * world)
    dist.all_gather_single(flat, torch.full((2,), float(rank)))
    check(flat, torch.arange(world).repeat_interleave(2).float(), "all_gather_single")
    part = torch.zeros(2)
    dist.reduce_scatter_single(part, torch.ones(2 * world))
    check(part, torch.full((2,), float(world)), "reduce_scatter_single")
    swapped = torch.zeros(world)
    dist.all_to_all_single(swapped, torch.full((world,), float(rank)))
    check(swapped, torch.arange(world, dtype=torch.float32), "all_to_all_single")


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="torch 2.14 has it")
def test_new_names_of_collectives_are_served(ranks):
    ranks.world(3).run(names_of_torch_2_14)


def late_once() -> None:
    group = dist.group.WORLD
    backend().set_timeout(seconds(0.5))
    group._add_ephemeral_timeout(seconds(OPERATION_LIMIT))
    work = dist.barrier(async_op=True)
    assert work.timeout > seconds(OPERATION_LIMIT)
    work.wait()
    later = dist.barrier(async_op=True)
    assert later.timeout == seconds(0.5)
    later.wait()


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "_add_ephemeral_timeout"), reason="torch 2.14")
def test_time_that_is_added_for_once_is_given_to_the_first_operation(ranks):
    ranks.world(2).run(late_once)
