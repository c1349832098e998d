"""What a Work of an operation on device tensors tells, and when."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from device_side import accelerator, check_sum, no_violation, ones, stalled
from rankside import backend, seconds


def durations() -> None:
    check_sum()
    dist.group.WORLD._enable_collectives_timing()
    began = time.monotonic()
    with stalled():
        work = dist.all_reduce(ones(10), async_op=True)
        with pytest.raises(RuntimeError, match="has not completed"):
            work._get_duration()
    work.check()
    assert 0 < work._get_duration() <= (time.monotonic() - began) * 1000
    no_violation()


def test_duration_is_told_when_timing_is_on(devices):
    devices.world(2).run(durations)


def duration_of_a_captured_one() -> str:
    dist.group.WORLD._enable_collectives_timing()
    check_sum()
    tensor, graph = ones(3), accelerator.Graph()
    torch.accelerator.synchronize()
    with graph.capture():
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
    with pytest.raises(RuntimeError) as caught:
        work._get_duration()
    graph.free()
    no_violation()
    return str(caught.value)


def test_duration_of_a_captured_operation_is_refused(devices):
    for text in devices.world(2).run(duration_of_a_captured_one):
        assert "captured into a graph" in text and "replay()" in text


def hook_on_the_device() -> int:
    group, told = dist.group.WORLD, []
    check_sum()
    group._register_on_completion_hook(told.append)
    with stalled():
        work = dist.all_reduce(ones(100), async_op=True)
        work.wait()
        assert not told
    group._wait_for_pending_works()
    assert work.is_completed() and len(told) == 1
    assert told[0].active_duration >= seconds(0)
    tensor, graph = ones(3), accelerator.Graph()
    torch.accelerator.synchronize()
    with graph.capture():
        dist.all_reduce(tensor)
    group._wait_for_pending_works()
    graph.free()
    assert len(told) == 1
    check_sum()
    group._wait_for_pending_works()
    no_violation()
    return len(told)


def test_hook_is_told_of_device_operations_when_their_stream_is_past_them(devices):
    workers = devices.pool.borrow(2)
    world = devices.made_by_init("ft", devices.pool.address(), workers)
    assert world.run(hook_on_the_device) == [2, 2]


def check_waits() -> list[bool]:
    work = dist.all_reduce(ones(10), async_op=True)
    backend().check()
    return [work.is_completed(), work.is_success()]


def test_check_returns_when_everything_is_complete(devices):
    assert devices.world(2).run(check_waits) == [[True, True]] * 2
