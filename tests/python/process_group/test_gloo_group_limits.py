"""What docs/limits.md says of groups of 'ft:gloo' is so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE, World, values_of
from rankside import connected_store, failure_of, kept, leave_default_group, seconds
from torch.nn.parallel import DistributedDataParallel


def begin(address: str, rank: int) -> None:
    leave_default_group()
    store, limit = connected_store(address), seconds(PATIENCE)
    dist.init_process_group("ft:gloo", store=store, rank=rank, world_size=2, timeout=limit)


def world_of_two(ranks) -> World:
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    values_of([world.start(rank, begin, address, rank) for rank in range(2)])
    return world


def exchanged() -> list[float]:
    """By one batch, in both directions."""
    rank = dist.get_rank()
    received = torch.zeros(3)
    batch = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return received.tolist()


def test_batches_of_messages_work(ranks):
    world = world_of_two(ranks)
    assert world.run(exchanged) == [[1.0] * 3, [0.0] * 3]
    world.run(leave_default_group)


def wrapped() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    kept["model"] = model


def future_fails() -> Any:
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    return failure_of(future.wait)


def backward_fails() -> Any:
    model: Any = kept.pop("model")
    return failure_of(lambda: model(torch.ones(1, 2)).sum().backward())


@pytest.mark.parametrize("fails", [future_fails, backward_fails])
def test_futures_and_backward_raise_comm_errors(ranks, fails: Callable[[], Any]):
    world = world_of_two(ranks)
    world.run(wrapped)
    world.kill(1)
    error = world.on(0, fails)
    assert error is not None and error.type == "PeerLostError", error
    world.on(0, leave_default_group)


def refused() -> list[str]:
    group: Any = dist.group.WORLD
    devices = failure_of(lambda: dist.all_reduce(torch.ones(1, device="meta")))
    barrier = failure_of(lambda: group.monitored_barrier())
    return [str(one and one.type) for one in (devices, barrier)]


def test_device_tensors_and_monitored_barriers_are_refused(ranks):
    world = world_of_two(ranks)
    assert all("None" not in kinds for kinds in world.run(refused))
    world.run(leave_default_group)
