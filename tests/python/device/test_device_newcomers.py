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

from torchft_ext.errors import CommAbortedError


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


def wrap_in_mixed_precision() -> None:
    """In a dtype that loses nothing, so that sums can be compared."""
    from torch.nn.parallel.distributed import _MixedPrecision

    dtypes = _MixedPrecision(torch.float64, torch.float64, torch.float64)
    kept["ddp"] = DistributedDataParallel(
        make_model().to(device()), bucket_cap_mb=0.0001, mixed_precision=dtypes
    )


def dtypes_of_parameters() -> set[torch.dtype]:
    return {parameter.dtype for parameter in kept["ddp"].parameters()}


def train_in_mixed_precision(steps: int, first: int = 0) -> None:
    model = kept["ddp"]
    rank, world = me()
    for step in range(first, first + steps):
        assert dtypes_of_parameters() == {torch.float32}
        alone = make_model()
        alone.load_state_dict(model.module.state_dict())
        expected = average_gradients(alone, world, step)
        model.zero_grad()
        loss_of(model, rank, step).backward()
        backend().check()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.cpu(), gradient)
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
    # No no_violation(): in a reducer's first backward the simulator finds kernels that use memory
    # which torch has freed, on a group of torch's fake backend too.


@pytest.mark.parametrize("before", (0, 3))
def test_mixed_precision_gives_the_mean_from_a_newcomers_first_step_on(devices, before):
    workers = devices.pool.borrow(3)
    pair = devices.world(2, workers=workers[:2])
    pair.run(wrap_in_mixed_precision)
    pair.run(train_in_mixed_precision, before)
    devices.world(1, workers=workers[2:]).run(wrap_in_mixed_precision)
    everybody = devices.world(3, workers=workers)
    everybody.run(take_state)
    everybody.run(train_in_mixed_precision, 3, first=before)


def forward_alone(step: int) -> None:
    kept["loss"] = loss_of(kept["ddp"], me()[0], step)
    assert dtypes_of_parameters() == {torch.float64}


def backward_too_late() -> None:
    assert dtypes_of_parameters() == {torch.float32}
    with pytest.raises(CommAbortedError, match="run forward"):
        kept.pop("loss").backward()


def test_a_forward_in_mixed_precision_that_a_generation_cuts_off_leaves_whole_parameters(devices):
    workers = devices.pool.borrow(2)
    pair = devices.world(2, workers=workers)
    pair.run(wrap_in_mixed_precision)
    pair.run(train_in_mixed_precision, 2)
    pair.run(forward_alone, 2)
    again = devices.world(2, workers=workers)
    again.run(backward_too_late)
    again.run(train_in_mixed_precision, 3, first=2)
