"""torch.distributed.split_group(), shrink_group() and new_group() of groups bound to a device."""

from __future__ import annotations

import device_side
import pytest
import torch
import torch.distributed as dist
from device_side import accelerator, device
from ranks import World
from rankside import backend
from torch.distributed import distributed_c10d as c10d
from values import check


def sums(group: dist.ProcessGroup | None, own: int, expected: int) -> None:
    """On the device, and on the CPU where the group serves it."""
    import torchft_ext

    tensor = torch.full((100,), float(own), device=device())
    dist.all_reduce(tensor, group=group)
    torchft_ext.backend(group).check()
    check(tensor.cpu(), torch.full((100,), float(expected)), "the group's sum")
    host = torch.tensor([own])
    dist.all_reduce(host, group=group)
    assert host.item() == expected


def split_and_sum(spec: str, address: str, rank: int, size: int) -> None:
    device_side.init(spec, address, rank, size, True)
    sums(None, 1, 3)
    group = dist.split_group(split_ranks=[[0, 2], [1]])
    assert group is not None
    assert (group.rank(), group.size()) == [(0, 2), (0, 1), (1, 2)][rank]
    sums(group, 1 + rank, [4, 2, 4][rank])
    pair = dist.new_group([0, 1])  # the third is asked to take part in a split without a colour
    if rank < 2:
        sums(pair, 1 + rank, 3)
    # torch's names of this group differ: its members are in different numbers of groups.
    part = dist.split_group(split_ranks=[[1, 2]])
    outside = part in (None, dist.GroupMember.NON_GROUP_MEMBER)  # the latter since torch 2.14
    assert outside == (rank == 0)
    if not outside:
        sums(part, 1 + rank, 5)


# torch 2.11's split_group asks for CUDA, whatever device the group has.
ASKS_FOR_CUDA = accelerator.simulated() and torch.__version__.startswith("2.11.")
MIXED = pytest.param(
    f"cpu:ft,{accelerator.NAME}:ft",
    marks=pytest.mark.skipif(ASKS_FOR_CUDA, reason="there is no CUDA device"),
)


@pytest.mark.parametrize("spec", ["ft", MIXED])
def test_group_bound_to_a_device_is_split(devices, spec):
    pool = devices.pool
    address, workers = pool.address(), pool.borrow(3)
    calls = [
        worker.call(split_and_sum, (spec, address, rank, 3), {})
        for rank, worker in enumerate(workers)
    ]
    for call in calls:
        call.value()


def init_and_sum(address: str, rank: int, size: int) -> None:
    device_side.init("ft", address, rank, size, True)
    sum_on_device(1, size)


def sum_on_device(own: int, expected: int) -> None:
    tensor = torch.full((100,), float(own), device=device())
    dist.all_reduce(tensor)
    backend().check()
    check(tensor.cpu(), torch.full((100,), float(expected)), "the group's sum")


def shrink_and_sum(excluded: list[int], own: int, expected: int) -> tuple[int, int]:
    c10d.shrink_group(excluded)
    sum_on_device(own, expected)
    return dist.get_rank(), dist.get_world_size()


def test_survivors_shrink_a_group_bound_to_a_device(devices):
    world = World(devices.pool, devices.pool.borrow(3))
    address = devices.pool.address()
    for call in [world.start(rank, init_and_sum, address, rank, 3) for rank in range(3)]:
        call.value()
    blocked = [world.start_blocked(rank, sum_on_device, 1, 0) for rank in (0, 2)]
    world.kill(1)
    for call in blocked:
        assert call.error("PeerLostError").cause["rank"] == 1
    calls = [world.start(rank, shrink_and_sum, [1], 1 + rank, 4) for rank in (0, 2)]
    assert [call.value() for call in calls] == [(0, 2), (1, 2)]
