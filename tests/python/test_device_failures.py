"""Deaths, aborts and timeouts under device operations: everyone is told, and streams are freed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_side import check_sum, device, inject, no_violation, ones, simulator
from rankside import (
    ErrorInfo,
    abort,
    backend,
    failure_of,
    kept,
    seconds,
    wait_errored,
)
from values import check, me

NOTICE = 20.0  # seconds in which a failure must have reached everyone


def warm() -> None:
    """Make the communicators, so that what follows is in mid-operation."""
    check_sum()
    rank, world = me()
    if world == 2:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, ones(1), 1 - rank),
                dist.P2POp(dist.irecv, ones(1), 1 - rank),
            ]
        )
        for work in works:
            work.wait()
        backend().check()


def begin_all_reduce() -> dist.Work:
    return dist.all_reduce(ones(1000), async_op=True)


def begin_recv() -> dist.Work:
    return dist.irecv(ones(1000), (me()[0] + 1) % me()[1])


def begin_broadcast() -> dist.Work:
    return dist.broadcast(ones(1000), (me()[0] + 1) % me()[1], async_op=True)


def released(begin) -> ErrorInfo:
    """Issue, let the current stream wait for it, and see what becomes of both."""
    work = begin()
    work.wait()  # the stream's, not the host's
    after = ones(5).add_(1)
    error = failure_of(work.check)
    assert error is not None
    torch.accelerator.synchronize()  # the stream is free
    check(after.cpu(), torch.full((5,), 2.0), "the next kernel ran")
    assert failure_of(backend().check).type == error.type
    assert not work.is_success() and backend().errored() is not None
    no_violation()
    return error


def released_all_reduce() -> ErrorInfo:
    return released(begin_all_reduce)


def released_recv() -> ErrorInfo:
    return released(begin_recv)


def released_broadcast() -> ErrorInfo:
    return released(begin_broadcast)


@pytest.mark.parametrize("size", (2, 4))
def test_sigkill_releases_streams_and_check_names_the_dead(devices, size):
    world = devices.world(size)
    world.run(warm)
    calls = [world.start_blocked(rank, released_all_reduce) for rank in range(size - 1)]
    pid = world.workers[-1].pid
    world.kill(size - 1)
    for call in calls:
        error = call.value(NOTICE)
        assert error.type == "PeerLostError" and error.cause["pid"] == pid, error.text
        assert error.fields["op"] == "allreduce" and error.cause["rank"] == size - 1
    devices.next(world, range(size - 1)).run(check_sum)


def test_sigkill_releases_a_receiver(devices):
    world = devices.world(2)
    world.run(warm)
    call = world.start_blocked(0, released_recv)
    world.kill(1)
    assert call.value(NOTICE).type == "PeerLostError"
    devices.next(world, [0]).run(check_sum)


def test_frozen_peer_releases_streams_after_the_heartbeat_limit(devices):
    world = devices.world(2, heartbeat=seconds(3))
    world.run(warm)
    call = world.start_blocked(0, released_all_reduce)
    world.freeze(1)
    error = call.value(NOTICE + 3)
    assert error.type == "PeerLostError", error.text


def test_abort_from_another_thread_releases_everyone(devices):
    world = devices.world(3)
    world.run(warm)
    calls = [world.start_blocked(rank, released_all_reduce) for rank in (0, 1)]
    world.side(0, abort)
    for call in calls:
        assert call.value(NOTICE).type == "CommAbortedError"
    devices.next(world, range(3)).run(check_sum)


def first_all_reduce() -> None:
    dist.all_reduce(ones(10), async_op=True).check()


def test_abort_releases_a_rank_whose_communicator_is_being_made(devices):
    world = devices.world(2)
    call = world.start_blocked(0, first_all_reduce)  # rank 1 does not come
    world.side(0, abort)
    call.error("CommAbortedError", patience=NOTICE)
    devices.next(world, range(2)).run(check_sum)


def test_sigkill_releases_a_rank_whose_communicator_is_being_made(devices):
    world = devices.world(2)
    call = world.start_blocked(0, first_all_reduce)
    world.kill(1)
    call.error("PeerLostError", patience=NOTICE)


def late_all_reduce() -> None:
    backend().set_timeout(seconds(2))
    dist.all_reduce(ones(10), async_op=True).check()


def test_operation_past_its_deadline_fails_the_epoch_for_everyone(devices):
    world = devices.world(2)
    world.run(warm)
    call = world.start_blocked(0, late_all_reduce)
    error = call.error("CommTimeoutError", patience=NOTICE)
    assert error.fields["op"] == "allreduce" and error.fields["limit"] == 2.0
    assert world.on(1, wait_errored).type == "CommTimeoutError"


def impatient_check() -> None:
    dist.all_reduce(ones(10), async_op=True)
    backend().check(seconds(0.5))


def test_check_that_runs_out_of_time_fails_the_epoch(devices):
    world = devices.world(2)
    world.run(warm)
    world.start(0, impatient_check).error("CommTimeoutError", patience=NOTICE)
    devices.next(world, range(2)).run(check_sum)


def explicit_timeout() -> None:
    dist.all_reduce(ones(10), async_op=True).wait(seconds(0.5))


def test_timeout_given_to_wait_blocks_the_host_and_raises(devices):
    world = devices.world(2)
    world.run(warm)
    error = world.start(0, explicit_timeout).error("CommTimeoutError", patience=NOTICE)
    assert error.fields["limit"] == 0.5


def blocking() -> None:
    dist.all_reduce(ones(10), async_op=True).wait()


def test_blocking_wait_raises_from_wait(devices):
    world = devices.world(2, blocking_wait=True)
    world.run(warm)
    call = world.start_blocked(0, blocking)
    world.kill(1)
    call.error("PeerLostError", patience=NOTICE)


def barrier() -> None:
    dist.barrier(device_ids=[device().index])


def test_device_barrier_blocks_the_host_and_raises(devices):
    world = devices.world(2)
    world.run(barrier)
    call = world.start_blocked(0, barrier)
    world.kill(1)
    call.error("PeerLostError", patience=NOTICE)


def untouched_after_failure() -> None:
    wait_errored()
    tensor = ones(10)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.is_completed() and not work.is_success()
    assert failure_of(work.wait).type == "CommAbortedError"
    assert failure_of(work.get_future().wait).type == "CommAbortedError"
    check(tensor.cpu(), torch.ones(10), "nothing was written")
    no_violation()


def test_later_operations_are_failed_works_and_touch_nothing(devices):
    world = devices.world(2)
    world.run(warm)
    world.side(0, abort)
    world.run(untouched_after_failure)


def poisoned() -> None:
    tensors = [ones(1001), torch.ones(7, dtype=torch.int64, device=device())]
    inject("hang allreduce count=-1")
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    after = ones(1).add_(1)
    failure_of(dist.barrier)  # all have entered it, whatever it says: both are in mid-operation
    abort()
    torch.accelerator.synchronize()
    assert tensors[0].cpu().isnan().all(), tensors[0]
    assert (tensors[1].cpu() == -1).all(), tensors[1]
    check(after.cpu(), torch.full((1,), 2.0), "the stream went on")
    inject("clear")
    no_violation()


def test_poison_leaves_nan_in_outputs_of_failed_operations(devices):
    world = devices.world(2, poison=True)
    world.run(warm)  # and what succeeds is not poisoned
    world.run(poisoned)
    devices.next(world, range(2), poison=True).run(check_sum)


def make_model() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(device())
    kept["ddp"] = torch.nn.parallel.DistributedDataParallel(model)


def train_step() -> list[float]:
    rank, world = me()
    model = kept["ddp"]
    model.zero_grad()
    model(ones(2, 8, value=rank + 1.0)).sum().backward()
    backend().check()
    return model.module.bias.grad.cpu().tolist() + [model.module.weight.grad[0, 0].item() / world]


def test_ddp_lives_through_epochs_of_other_sizes(devices):
    world = devices.world(3)
    world.run(make_model)
    for grads in world.run(train_step):
        assert grads[0] == 2.0 and grads[-1] == pytest.approx(2 * 2 / 3)
    world = devices.next(world, [2, 0])
    for grads in world.run(train_step):
        assert grads[0] == 2.0 and grads[-1] == pytest.approx(2 * 1.5 / 2)


def counts() -> list[int]:
    torch.accelerator.synchronize()
    report = simulator().report()
    stats = backend().stats()
    return [report["live_communicators"], len(stats["threads"]), stats["descriptors"]]


def test_epochs_leave_no_thread_descriptor_or_communicator(devices):
    world = devices.world(2)
    world.run(check_sum)
    before = world.run(counts)
    for _ in range(10):
        world = devices.next(world, range(2))
        world.run(check_sum)
        world.side(0, abort)
        world.run(wait_errored)
    world = devices.next(world, range(2))
    world.run(check_sum)
    for then, now in zip(before, world.run(counts), strict=True):
        assert now[0] <= then[0] + 1 and now[1] <= then[1] and now[2] <= then[2] + 3, (then, now)
