"""torch's other ways to train on devices: FSDP1, DDP's communication hooks, ZeRO, collectives with
gradients. DDP and FSDP2 through changes of size: test_device_training.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_side import check_sum, device, no_violation
from rankside import ErrorInfo, backend, failure_of, kept
from test_features import average_gradients, loss_of, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from values import check, me

NOTICE = 20.0  # seconds in which a failure must have reached everyone


def train_alone(reference: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step with the mean gradients of all ranks."""
    gradients = average_gradients(reference, me()[1], step)
    for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def expect_same(model: nn.Module, reference: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach())


# ---- FSDP1


def wrap_in_fsdp1(strategy: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    kept["fsdp1"] = FullyShardedDataParallel(
        make_model().to(device()),
        device_id=device(),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
    )


def train_fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, reference = kept["fsdp1"], make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, me()[0], step).backward()
        model.clip_grad_norm_(1e9)
        backend().check()
        optimizer.step()
        # FSDP1 makes gradients on a stream of its own, and lets go of them while the optimizer may
        # still read them: right where that stream alone uses the memory again, as with CUDA. The
        # simulated device gives it back at once.
        torch.accelerator.synchronize()
        train_alone(reference, alone, step)
    with FullyShardedDataParallel.summon_full_params(model):
        expect_same(model, reference)
    backend().check()
    no_violation()


def fsdp1_in_vain() -> ErrorInfo:
    def one() -> None:
        loss_of(kept["fsdp1"], me()[0], 0).backward()
        backend().check()

    return failure_of(one)


@pytest.mark.parametrize("strategy", ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
def test_fsdp1_on_devices_trains_like_one_process(devices, strategy):
    world = devices.world(2)
    world.run(wrap_in_fsdp1, strategy)
    world.run(train_fsdp1)


def test_fsdp1_on_devices_is_released_by_a_kill_and_wrapped_anew(devices):
    world = devices.world(3)
    world.run(wrap_in_fsdp1, "FULL_SHARD")
    world.run(check_sum)
    calls = [world.start_blocked(rank, fsdp1_in_vain) for rank in (0, 2)]
    world.kill(1)
    for call in calls:
        error = call.value(NOTICE)
        assert error.type == "PeerLostError" and error.cause["rank"] == 1, error.text
    world = devices.next(world, [2, 0])
    world.run(wrap_in_fsdp1, "FULL_SHARD")
    world.run(train_fsdp1)


# ---- DDP's communication hooks, ZeRO


def train_with_hook(name: str) -> None:
    """A hook that rounds, or that needs a few steps to be exact: gradients all ranks agree on."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    rank, world = me()
    model = DistributedDataParallel(make_model().to(device()), static_graph=True)
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        backend().check()
        for parameter in model.parameters():
            both = [torch.empty_like(parameter) for _ in range(world)]
            dist.all_gather(both, parameter.grad)
            backend().check()
            assert all(torch.equal(other.cpu(), both[0].cpu()) for other in both), (name, step)
    if name == "fp16":
        expected = average_gradients(model.module, world, 3)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.cpu(), gradient.cpu(), rtol=0.05, atol=0.01)
    no_violation()


@pytest.mark.parametrize("name", ("fp16", "powersgd"))
def test_ddp_hooks_on_devices_agree_on_gradients(devices, name):
    devices.world(2).run(train_with_hook, name)


def train_zero() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, reference = DistributedDataParallel(make_model().to(device())), make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    alone = torch.optim.Adam(reference.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, me()[0], step).backward()
        backend().check()
        optimizer.step()
        train_alone(reference, alone, step)
    backend().check()
    expect_same(model, reference)
    no_violation()


def test_zero_optimizer_on_devices_trains_like_one_process(devices):
    devices.world(2).run(train_zero)


# ---- collectives that autograd runs backwards


def gradients_of_collectives() -> None:
    import torch.distributed.nn.functional as collectives

    rank, world = me()
    group = dist.group.WORLD  # torch's default is the one that there was when this was imported

    def mine(count: int) -> torch.Tensor:
        return torch.full((count,), rank + 1.0, device=device(), requires_grad=True)

    summed = mine(4)
    collectives.all_reduce(summed, group=group).sum().backward()
    check(summed.grad.cpu(), torch.full((4,), float(world)), "all_reduce")
    gathered = mine(2)
    parts = collectives.all_gather(gathered, group=group)
    sum(part.sum() * (i + 1) for i, part in enumerate(parts)).backward()
    check(gathered.grad.cpu(), torch.full((2,), world * (rank + 1.0)), "all_gather")
    sent = mine(2 * world)
    received = collectives.all_to_all_single(
        torch.empty(2 * world, device=device()), sent, group=group
    )
    (received * (rank + 1)).sum().backward()
    check(sent.grad.cpu(), torch.arange(1.0, world + 1).repeat_interleave(2), "all_to_all")
    backend().check()
    no_violation()


def test_collectives_on_devices_have_gradients(devices):
    devices.world(3).run(gradients_of_collectives)
