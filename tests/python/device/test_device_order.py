"""Operations on device tensors run in the order of the streams that they are called on."""

from __future__ import annotations

import contextlib
import threading

import torch
import torch.distributed as dist
from device_side import (
    accelerator,
    check_sum,
    device,
    hold,
    let_go,
    no_violation,
    ones,
    stalled,
    stream_of_its_own,
)
from rankside import backend, wait_until
from values import check, me

# Of normal priority, handed out in turn. A real device has too many to hold up all of them.
NORMAL_STREAMS = 8 if accelerator.simulated() else 0


def beside_stalled_streams() -> None:
    """All streams of normal priority are held up, so only one of high priority gets anywhere."""
    rank, world = me()
    check_sum()
    tensor = ones(33, value=rank + 1.0)
    torch.accelerator.synchronize()
    module = torch.get_device_module(accelerator.NAME)
    with contextlib.ExitStack() as held:
        for _ in range(NORMAL_STREAMS):
            with module.stream(torch.Stream(device=device())):
                held.enter_context(stalled())
        work = dist.all_reduce(tensor, async_op=True)
        wait_until(work.is_completed, "the sum on a stream of its own")
        work.wait()
        check(tensor.cpu(), torch.full((33,), world * (world + 1) / 2), "the sum")
    no_violation()


def test_streams_of_high_priority_serve_a_generation(devices):
    devices.world(2, high_priority_stream=True).run(beside_stalled_streams)


def on_the_current_stream() -> None:
    _, world = me()
    stream = torch.Stream(device=device())
    tensor = ones(1000)
    torch.accelerator.synchronize()
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        tensor.mul_(3)
        dist.all_reduce(tensor)  # behind the product, before the next one, no wait in between
        tensor.mul_(2)
        check(tensor.cpu(), torch.full((1000,), 6.0 * world), "in stream order")
    finally:
        torch.accelerator.set_stream(before)
    no_violation()


def test_synchronous_operation_runs_in_the_order_of_the_current_stream(devices):
    devices.world(2).run(on_the_current_stream)


def on_several_streams() -> None:
    """As FSDP2 does: gathers on one stream, reductions on another, nothing between the two."""
    _, world = me()
    streams = [torch.Stream(device=device()) for _ in range(2)]
    tensors = [ones(5 + n) for n in range(20)]
    torch.accelerator.synchronize()
    for n, tensor in enumerate(tensors):
        with torch.get_device_module(accelerator.NAME).stream(streams[n % 2]):
            dist.all_reduce(tensor)
    backend().check()
    torch.accelerator.synchronize()
    for n, tensor in enumerate(tensors):
        check(tensor.cpu(), torch.full((5 + n,), float(world)), n)
    no_violation()


def test_operations_on_several_streams_keep_the_order_of_issue(devices):
    devices.world(3).run(on_several_streams)


def wait_does_not_block() -> None:
    check_sum()
    _, world = me()
    tensor = ones(10)
    with stalled():  # nothing on the current stream moves
        work = dist.all_reduce(tensor, async_op=True)
        assert work.wait()
        future = work.get_future()
        assert future.done() and not work.is_completed()
    tensor.add_(1)
    work.check()
    assert work.is_completed() and work.is_success()
    check(future.value()[0].cpu(), torch.full((10,), world + 1.0), "after the stream moved")
    no_violation()


def test_wait_blocks_the_stream_and_not_the_host(devices):
    devices.world(2).run(wait_does_not_block)


def coalesced_on_two_streams() -> None:
    rank, _ = me()
    check_sum()
    tensor, other = ones(5, value=rank), stream_of_its_own()
    torch.accelerator.synchronize()
    stream_of = torch.get_device_module(accelerator.NAME).stream
    with dist._coalescing_manager(device=device(), async_ops=True) as manager:
        with stream_of(other):
            hold()
            tensor.add_(10)
            dist.broadcast(tensor, 0, async_op=True)
    threading.Timer(0.2, let_go).start()
    manager.wait()
    check(tensor.cpu(), torch.full((5,), 10.0), "behind what that stream had to do first")
    no_violation()


def test_coalesced_operations_come_behind_the_streams_they_were_called_on(devices):
    devices.world(2).run(coalesced_on_two_streams)
