"""Training on devices, through kills and changes of size: DDP and FSDP2."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from device_side import accelerator, device, no_violation
from ranks import World
from rankside import ErrorInfo, backend, failure_of, kept
from test_features import average_gradients, loss_of, make_model, train_ddp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from values import me

NOTICE = 20.0  # seconds in which a failure must have reached everyone


def wrap_in_ddp() -> None:
    kept["ddp"] = DistributedDataParallel(make_model().to(device()))


def train(steps: int, first: int = 0) -> None:
    """Exact steps, each checked against the same step taken alone."""
    train_ddp(steps, first)
    backend().check()
    no_violation()


@pytest.mark.parametrize("size", (1, 3))
def test_ddp_on_devices_averages_gradients(devices, size):
    world = devices.world(size)
    world.run(wrap_in_ddp)
    world.run(train, 3)


def test_ddp_on_devices_divides_by_the_new_size_after_configure(devices):
    world = devices.world(3)
    world.run(wrap_in_ddp)
    world.run(train, 2)
    world = devices.next(world, [2, 0])
    world.run(train, 2, first=2)


def step_that_fails(step: int) -> ErrorInfo:
    """A training loop's step: nothing is applied before check()."""
    model = kept["ddp"]
    before = copy.deepcopy(model.module.state_dict())

    def one() -> None:
        loss_of(model, me()[0], step).backward()
        backend().check()

    error = failure_of(one)
    torch.accelerator.synchronize()
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor.cpu(), before[name].cpu()), name
    return error


def lose_one_of_three_while_training(world: World) -> World:
    """Rank 1, in the step after the second; the others have been told."""
    calls = [world.start_blocked(rank, step_that_fails, 2) for rank in (0, 2)]
    world.kill(1)
    for call in calls:
        error = call.value(NOTICE)
        assert error.type == "PeerLostError" and error.cause["rank"] == 1, error.text
    return world


def test_ddp_on_devices_trains_on_through_a_kill(devices):
    world = devices.world(3)
    world.run(wrap_in_ddp)
    world.run(train, 2)
    world = devices.next(lose_one_of_three_while_training(world), [0, 2])
    world.run(train, 3, first=2)


# ---- FSDP2


def shard(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(accelerator.NAME, (me()[1],))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def wrap_in_fsdp() -> None:
    """A sharded model, and what it was made of: on a first generation from a seed, later from a
    copy."""
    whole = kept.get("whole") or make_model().state_dict()
    model = make_model()
    model.load_state_dict(whole)
    reference = copy.deepcopy(model)
    kept["fsdp"], kept["alone"] = shard(model.to(device())), reference


def train_fsdp(steps: int, first: int = 0) -> None:
    """Exact steps; after each, when everything has arrived, a copy on the host."""
    rank, world = me()
    model, reference = kept["fsdp"], kept["alone"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        backend().check()
        optimizer.step()
        alone.zero_grad()
        gradients = average_gradients(reference, world, step)
        for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
            parameter.grad = gradient
        alone.step()
        kept["whole"] = {
            name: tensor.full_tensor().cpu() for name, tensor in model.state_dict().items()
        }
        backend().check()
        for name, expected in reference.state_dict().items():
            torch.testing.assert_close(kept["whole"][name], expected)
    no_violation()


@pytest.mark.parametrize("size", (1, 2))
def test_fsdp2_on_devices_trains_like_one_process(devices, size):
    world = devices.world(size)
    world.run(forget_model)
    world.run(wrap_in_fsdp)
    world.run(train_fsdp, 3)


def forget_model() -> None:
    kept.pop("whole", None)


def fsdp_step_that_fails(step: int) -> ErrorInfo:
    def one() -> None:
        loss_of(kept["fsdp"], me()[0], step).backward()
        backend().check()

    error = failure_of(one)
    torch.accelerator.synchronize()
    return error


def test_fsdp2_on_devices_trains_on_through_a_kill_with_fewer(devices):
    world = devices.world(3)
    world.run(forget_model)
    world.run(wrap_in_fsdp)
    world.run(train_fsdp, 2)
    calls = [world.start_blocked(rank, fsdp_step_that_fails, 2) for rank in (0, 2)]
    world.kill(1)
    for call in calls:
        error = call.value(NOTICE)
        assert error.type == "PeerLostError" and error.cause["rank"] == 1, error.text
    world = devices.next(world, [0, 2])
    world.run(wrap_in_fsdp)  # from the last good step, over the mesh of now
    world.run(train_fsdp, 2, first=2)


def wrap_in_hybrid() -> None:
    """Replicas of shards, over groups that torch makes by itself."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(
        accelerator.NAME, (2, me()[1] // 2), mesh_dim_names=("replica", "shard")
    )
    kept["mesh"], kept["hybrid"] = mesh, make_model().to(device())
    fully_shard(kept["hybrid"], mesh=mesh)


def check_hybrid(step: int) -> None:
    import torchft_ext

    rank, world = me()
    model = kept["hybrid"]
    model.zero_grad()
    loss_of(model, rank, step).backward()
    backend().check()
    expected = average_gradients(make_model(), world, step)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor().cpu(), gradient)
    for name in ("replica", "shard"):
        torchft_ext.backend(kept["mesh"].get_group(name)).check()
    no_violation()


def next_generations(address: str) -> None:
    """The first replica goes on alone: every group of it begins a generation of its own."""
    import torchft_ext

    rank, mesh = me()[0], kept["mesh"]
    backend().configure(f"{address}/all", rank, 2)
    replica, shard = (torchft_ext.backend(mesh.get_group(n)) for n in ("replica", "shard"))
    replica.configure(f"{address}/replica{rank}", 0, 1)
    shard.configure(f"{address}/shard", rank, 2)


def test_hybrid_mesh_of_devices_goes_on_with_one_replica_fewer(devices):
    pool = devices.pool
    world = devices.made_by_init("ft", pool.address(), pool.borrow(4))
    world.run(wrap_in_hybrid)
    world.run(check_hybrid, 0)
    world.kill(3)
    address = pool.address()
    calls = [world.start(rank, next_generations, address) for rank in (0, 1)]
    for call in calls:
        call.value()
    for call in [world.start(rank, check_hybrid, 1) for rank in (0, 1)]:
        call.value()
