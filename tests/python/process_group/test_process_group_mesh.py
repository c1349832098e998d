"""FSDP2 with hybrid sharding on a mesh whose outer dimension is a group that changes its size.

Four processes: two replicas of two shards. The shards of a replica are a default group of gloo's.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from process_group_side import LIMIT
from ranks import World, values_of
from rankside import connected_store, kept, leave_default_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchft_ext import process_group as pgs


def begin(kind: str, address: str, rank: int) -> tuple[list[str], tuple[int, ...], int]:
    """Its mesh's names and shape, and the size of the group along the first of them."""
    leave_default_group()
    replica, shard = divmod(rank, 2)
    store = dist.PrefixStore(f"replica{replica}", connected_store(address))
    dist.init_process_group("gloo", store=store, rank=shard, world_size=2)
    group = getattr(pgs, f"ProcessGroup{kind}")(timeout=LIMIT)
    group.configure(f"{address}/first{shard}", replica, 2)
    inner = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    mesh = pgs.extend_device_mesh(inner, group.register("dp"))
    torch.manual_seed(0)
    kept["model"] = fully_shard(torch.nn.Linear(3, 2, bias=False), mesh=mesh)
    kept["group"] = group
    return list(mesh.mesh_dim_names), tuple(mesh.mesh.shape), mesh["dp"].get_group().size()


def gradients(value: float) -> list[float]:
    """This shard's, of one step."""
    model = kept["model"]
    model.zero_grad()
    model(torch.full((1, 3), value)).sum().backward()
    return model.weight.grad.to_local().flatten().tolist()


def go_on_alone(address: str, shard: int) -> int:
    kept["group"].configure(f"{address}/second{shard}", 0, 1)
    return kept["group"].size()


@pytest.mark.parametrize("kind", ["Host", "Gloo"])
def test_hybrid_sharding_replicates_along_the_group_and_outlives_a_replica(ranks, kind):
    world, address = World(ranks, ranks.borrow(4)), ranks.address()
    calls = [world.start(rank, begin, kind, address, rank) for rank in range(4)]
    assert values_of(calls) == [(["dp", "shard"], (1, 2), 2)] * 4
    calls = [world.start(rank, gradients, float(rank)) for rank in range(4)]
    assert values_of(calls) == [[1.5] * 3] * 4
    for rank in (2, 3):
        world.kill(rank)
    address = ranks.address()
    calls = [world.start(rank, go_on_alone, address, rank) for rank in range(2)]
    assert values_of(calls) == [1, 1]
    calls = [world.start(rank, gradients, float(rank)) for rank in range(2)]
    assert values_of(calls) == [[0.5] * 3] * 2
    for rank in range(2):  # torch keeps the mesh, and so the group and its store's thread
        world.kill(rank)


def test_mesh_wants_a_registered_group():
    mesh = SimpleNamespace(mesh_dim_names=("shard",))
    with pytest.raises(ValueError, match="expected a registered group"):
        pgs.extend_device_mesh(mesh, pgs.ProcessGroupDummy())
    with pytest.raises(ValueError, match="expected a new one, found 'shard'"):
        pgs.extend_device_mesh(mesh, pgs.ProcessGroupDummy(), name="shard")
