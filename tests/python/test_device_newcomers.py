"""DDP on devices when a newcomer joins: gradients, layouts that are compared on the host, hooks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_side import device, no_violation
from rankside import backend, kept
from test_ddp_members import Pair
from test_features import average_gradients, loss_of, make_model, train_ddp
from torch.nn.parallel import DistributedDataParallel
from values import me


def wrap_in_ddp() -> None:
    kept["ddp"] = DistributedDataParallel(make_model().to(device()), bucket_cap_mb=0.0001)


def take_state() -> None:
    for parameter in kept["ddp"].module.parameters():
        dist.broadcast(parameter.data, 0)
    backend().check()


def train(steps: int, first: int = 0) -> None:
    train_ddp(steps, first)
    backend().check()
    no_violation()


@pytest.mark.parametrize("before", (0, 3))
def test_gradients_on_devices_are_the_mean_from_a_newcomers_first_step_on(devices, before):
    workers = devices.pool.borrow(3)
    pair = devices.world(2, workers=workers[:2])
    pair.run(wrap_in_ddp)
    pair.run(train, before)
    devices.world(1, workers=workers[2:]).run(wrap_in_ddp)
    everybody = devices.world(3, workers=workers)
    everybody.run(take_state)
    everybody.run(train, 3, first=before)


def wrap_pair(shapes: list[tuple[int, int]]) -> None:
    kept["pair"] = DistributedDataParallel(Pair(shapes).to(device()))


def backward_of_pair() -> None:
    kept["pair"]().backward()
    backend().check()


def test_layouts_of_buckets_on_devices_are_compared_on_the_host(devices):
    workers = devices.pool.borrow(2)
    devices.world(1, workers=workers[:1]).run(wrap_pair, [(2, 3), (3, 2)])
    devices.world(1, workers=workers[1:]).run(wrap_pair, [(3, 2), (2, 3)])
    for call in devices.world(2, workers=workers).start_all(backward_of_pair):
        assert "other bucket layout" in call.error("MismatchError").text


def wrap_with_optimizer_in_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = make_model().to(device())
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    kept["ddp"] = DistributedDataParallel(model)


def train_in_backward(steps: int, first: int = 0) -> None:
    model = kept["ddp"]
    rank, world = me()
    for step in range(first, first + steps):
        expected = average_gradients(model.module, world, step)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        loss_of(model, rank, step).backward()
        backend().check()
        for parameter, was, gradient in zip(model.parameters(), before, expected, strict=True):
            torch.testing.assert_close(parameter.detach(), was - 0.1 * gradient)


def test_an_optimizer_in_backward_sees_the_mean_with_a_newcomer(devices):
    workers = devices.pool.borrow(3)
    pair = devices.world(2, workers=workers[:2])
    pair.run(wrap_with_optimizer_in_backward)
    pair.run(train_in_backward, 2)
    devices.world(1, workers=workers[2:]).run(wrap_with_optimizer_in_backward)
    everybody = devices.world(3, workers=workers)
    everybody.run(take_state)
    everybody.run(train_in_backward, 3, first=2)
