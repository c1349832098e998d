"""torchft_ext.make_group(): groups without init_process_group()."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import World, values_of
from rankside import OPERATION_LIMIT, connected_store, leave_default_group, seconds

import torchft_ext
from torchft_ext import _groups

made: list[dist.ProcessGroup] = []


def make(address: str, rank: int, size: int, **options: object) -> tuple[int, int, str]:
    leave_default_group()
    group = torchft_ext.make_group(
        connected_store(address), rank, size, timeout=seconds(OPERATION_LIMIT), **options
    )
    made[:] = [group]
    return group.rank(), group.size(), torchft_ext.backend(group).group_name


def summed() -> float:
    """The sum over all ranks of rank + 1, by torch's own function and by the group's method."""
    (group,) = made
    tensor = torch.tensor([group.rank() + 1.0])
    dist.all_reduce(tensor, group=group)
    again = torch.tensor([group.rank() + 1.0])
    group.allreduce([again]).wait()
    assert torch.equal(tensor, again)
    return tensor.item()


def failure_after_a_death() -> str:
    (group,) = made
    with pytest.raises(torchft_ext.PeerLostError) as caught:
        dist.all_reduce(torch.ones(1), group=group)
    assert caught.value.cause.rank == 2
    return torchft_ext.backend(group).group_name


def go_on(address: str, rank: int, size: int) -> tuple[float, int]:
    """The same object after another membership; says goodbye then."""
    (group,) = made
    torchft_ext.backend(group).configure(
        address, rank=rank, world_size=size, timeout=seconds(OPERATION_LIMIT)
    )
    result = summed(), group.size()
    group.shutdown()
    made.clear()
    return result


def test_group_without_torchs_tables_survives_a_death(ranks):
    world, address = World(ranks, ranks.borrow(3)), ranks.address()
    calls = [world.start(rank, make, address, rank, 3, name="own") for rank in range(3)]
    assert values_of(calls) == [(rank, 3, "own") for rank in range(3)]
    assert world.run(summed) == [6.0] * 3
    world.kill(2)
    survivors = World(ranks, world.workers[:2])
    assert survivors.run(failure_after_a_death) == ["own"] * 2
    place = ranks.address()
    calls = [survivors.start(rank, go_on, place, rank, 2) for rank in range(2)]
    assert values_of(calls) == [(3.0, 2)] * 2


def test_bad_arguments_are_refused_in_the_name_of_make_group():
    store = dist.HashStore()
    with pytest.raises(ValueError, match=r"make_group: rank: expected .* found 2"):
        torchft_ext.make_group(store, 2, 2)
    with pytest.raises(ValueError, match="make_group: world_size: expected at least 1, found 0"):
        torchft_ext.make_group(store, 0, 0)
    with pytest.raises(ValueError, match="make_group: store: expected a store, found None"):
        torchft_ext.make_group(None, 0, 1)
    with pytest.raises(ValueError, match=r"make_group: timeout: expected .* found 0 ms"):
        torchft_ext.make_group(store, 0, 1, timeout=seconds(0))
    with pytest.raises(ValueError, match=r"make_group: backend: expected one of .* found 'gloo'"):
        torchft_ext.make_group(store, 0, 1, backend="gloo")


def test_groups_without_names_get_a_number_each():
    first, second = (torchft_ext.make_group(dist.HashStore(), 0, 1) for _ in range(2))
    names = [torchft_ext.backend(group).group_name for group in (first, second)]
    assert names[0] != names[1]
    for group in (first, second):
        group.shutdown()


def adopt_published() -> tuple[int, float]:
    """What C++'s publish() does, done here: the group stands in torch's registry."""
    from torch._C import _distributed_c10d as _c10d

    (group,) = made
    _c10d._register_process_group("of-cpp", group)
    with pytest.raises(ValueError, match="adopt: name: expected one that C\\+\\+ has published"):
        torchft_ext.adopt("nobody's")
    adopted = torchft_ext.adopt("of-cpp")
    assert torchft_ext.adopt("of-cpp") is adopted
    tensor = torch.tensor([adopted.rank() + 1.0])
    dist.broadcast(tensor, src=1, group=adopted)  # by torch's tables
    total = funcol.all_reduce(torch.tensor([adopted.rank() + 1.0]), "sum", "of-cpp")
    _c10d._unregister_process_group("of-cpp")
    _groups.leave_numbered(adopted)
    group.shutdown()
    made.clear()
    return int(tensor.item()), float(total.item())


def test_published_group_is_adopted(ranks):
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    calls = [world.start(rank, make, address, rank, 2) for rank in range(2)]
    values_of(calls)
    assert world.run(adopt_published) == [(2, 3.0)] * 2
