"""What operations on device tensors keep, and on which device they ask."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_side import accelerator, check_sum, init, no_violation, ones
from rankside import backend


def users_of(tensor: torch.Tensor) -> int:
    """Of its memory; whoever keeps a view of it counts."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def kept_while_under_way(waited: bool) -> int:
    """References to the memory of a sum that the stream has not reached, the Work being gone."""
    check_sum()
    tensor = ones(10)
    before = users_of(tensor)
    with accelerator.stalled():
        work = dist.all_reduce(tensor.view(2, 5), async_op=True)
        if waited:
            work.wait()
        del work
        kept = users_of(tensor) - before
    backend().check()
    no_violation()
    return kept


def test_tensors_are_let_go_once_a_stream_waits_for_the_operation(devices):
    world = devices.world(2)
    assert world.run(kept_while_under_way, True) == [0, 0]
    assert all(kept > 0 for kept in world.run(kept_while_under_way, False))


def left_after_wait() -> list[int]:
    """Allocations, of tensors that nobody but their operations holds, once wait() has returned."""
    check_sum()
    left = []
    for _ in range(20):
        before = accelerator.device_bytes()
        work = dist.all_reduce(ones(1000), async_op=True)
        work.wait()
        torch.accelerator.synchronize()
        left.append(accelerator.device_bytes() - before)
    backend().check()
    no_violation()
    return left[1:]  # the first may be what makes something for good


@pytest.mark.skipif(not accelerator.nccl_simulated(), reason="allocations are counted there")
def test_what_wait_lets_go_of_is_gone_when_it_returns_on_the_simulator(devices):
    assert devices.world(2).run(left_after_wait) == [[0] * 19] * 2


def kept_by_one_on_the_current_stream() -> int:
    check_sum()
    tensor = ones(10)
    before = users_of(tensor)
    with accelerator.stalled():
        dist.all_reduce(tensor.view(2, 5))
        kept = users_of(tensor) - before
    backend().check()
    return kept


def test_tensors_of_operations_on_the_current_stream_are_not_kept(devices):
    assert devices.world(2).run(kept_by_one_on_the_current_stream) == [0, 0]


def calls_about_another_device() -> dict[str, int]:
    """On the device that this thread is at, while its tensors are on another one."""
    simulator = accelerator.simulator()
    before = simulator.report()["counts"]
    torch.accelerator.set_device_index(0)
    tensor = torch.ones(10, device=f"{accelerator.NAME}:1")
    dist.all_reduce(tensor, async_op=True).wait()
    dist.all_reduce(tensor)
    backend().check()
    after = simulator.report()["counts"]
    asked = ("recorded on 0", "blocked on 0", "asked for a capture on 0", "queried on 0")
    return {name: after.get(name, 0) - before.get(name, 0) for name in asked}


@pytest.mark.skipif(not accelerator.nccl_simulated(), reason="counts are the simulator's")
def test_nothing_is_asked_on_a_device_that_is_not_the_operations_on_the_simulator(devices):
    (counts,) = devices.world(1).run(calls_about_another_device)
    assert set(counts.values()) == {0}, counts


def barrier_before_anything(address: str) -> str:
    init("ft:nccl", address, 0, 1)
    with pytest.raises(ValueError, match=r"barrier\(device_ids=\[index\]\)") as caught:
        dist.barrier()
    dist.all_reduce(ones(3))
    dist.barrier()  # where that was
    return str(caught.value)


def test_barrier_does_not_guess_its_device(devices):
    pool = devices.pool
    (worker,) = pool.borrow(1)
    text = worker.call(barrier_before_anything, (pool.address(),), {}).value()
    assert "device_ids: expected the device on which it is held" in text
