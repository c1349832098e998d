"""Deaths, aborts and timeouts under device operations: everyone is told, and streams are freed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import device_side
import pytest
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
    reaped,
    stream_waits_for,
)
from device_worlds import BOTH_KINDS, device_environment
from heap import heap_bytes
from rankside import (
    ErrorInfo,
    abort,
    backend,
    failure_of,
    kept,
    seconds,
    wait_errored,
    wait_until,
)
from records import record
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
    stream_waits_for(work)
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


@BOTH_KINDS
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


ENDS = """
import ctypes, sys
import device_side, torch, torch.distributed as dist, torchft_ext

device_side.accelerator.prepare()
options = torchft_ext.Options(poison=True)
dist.init_process_group(
    "ft", store=dist.HashStore(), rank=0, world_size=1, pg_options=options
)
for _ in range(3):
    dist.all_reduce(device_side.ones(1000), async_op=True)
dist.barrier(device_ids=[torch.accelerator.current_device_index()])
never_waited_for = torch.ops._c10d_functional.all_reduce(device_side.ones(3), "sum", "0")
print("over", flush=True)
if "by exit() alone" in sys.argv:
    ctypes.PyDLL(None).exit(0)  # Python does not end: none of its hooks is called
if "with an exception" in sys.argv:
    raise SystemExit("an exception")
"""


@pytest.mark.parametrize("how", ("quietly", "with an exception", "by exit() alone"))
def test_process_that_ends_with_a_live_group_is_not_killed(rank_env, how):
    """torch's tables keep the group, and go when the device's runtime has been unloaded."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS, how],
        env=device_environment(rank_env),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.stdout == "over\n", done.stderr
    assert done.returncode == (how == "with an exception"), done.stderr
    assert "device has ended" not in done.stderr and "shutting down" not in done.stderr, done.stderr


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


@BOTH_KINDS
def test_abort_releases_a_rank_whose_communicator_is_being_made(devices):
    world = devices.world(2)
    call = world.start_blocked(0, first_all_reduce)  # rank 1 does not come
    world.side(0, abort)
    call.error("CommAbortedError", patience=NOTICE)
    devices.next(world, range(2)).run(check_sum)


@BOTH_KINDS
def test_sigkill_releases_a_rank_whose_communicator_is_being_made(devices):
    world = devices.world(2)
    call = world.start_blocked(0, first_all_reduce)
    world.kill(1)
    call.error("PeerLostError", patience=NOTICE)


def leave() -> None:
    backend().shutdown()


@BOTH_KINDS
def test_goodbye_of_a_member_fails_operations_that_still_need_it(devices):
    world = devices.world(2)
    world.run(warm)
    call = world.start_blocked(0, released_all_reduce)
    world.start(1, leave).value()
    error = call.value(NOTICE)
    assert error.type == "PeerLeftError" and error.cause["rank"] == 1, error.text
    world.run(leave_group)


def leave_group() -> None:
    device_side.leave()


def late_all_reduce() -> None:
    backend().set_timeout(seconds(2))
    dist.all_reduce(ones(10), async_op=True).check()


@BOTH_KINDS
def test_operation_past_its_deadline_fails_the_generation_for_everyone(devices):
    world = devices.world(2)
    world.run(warm)
    call = world.start_blocked(0, late_all_reduce)
    error = call.error("CommTimeoutError", patience=NOTICE)
    assert error.fields["op"] == "allreduce" and error.fields["limit"] == 2.0
    assert world.on(1, wait_errored).type == "CommTimeoutError"


def impatient_check() -> None:
    dist.all_reduce(ones(10), async_op=True)
    backend().check(seconds(0.5))


def test_check_that_runs_out_of_time_fails_the_generation(devices):
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
    after = ones(1)
    if me()[0] == 1:
        hold()  # nobody's sums end: those of this rank do not begin
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    after.add_(1)
    failure_of(lambda: dist.all_reduce(torch.ones(1)))  # all have issued theirs, whatever it says
    abort()
    if me()[0] == 1:
        let_go()
    torch.accelerator.synchronize()
    assert tensors[0].cpu().isnan().all(), tensors[0]
    assert (tensors[1].cpu() == -1).all(), tensors[1]
    check(after.cpu(), torch.full((1,), 2.0), "the stream went on")
    no_violation()


@BOTH_KINDS
def test_poison_leaves_nan_in_outputs_of_failed_operations(devices):
    world = devices.world(2, poison=True)
    world.run(warm)  # and what succeeds is not poisoned
    world.run(poisoned)
    world = devices.next(world, range(2), poison=True)  # the same group: its options survive
    world.run(check_sum)
    world.run(poisoned)
    devices.next(world, range(2), poison=True).run(check_sum)


GENERATIONS = 20 if accelerator.simulated() else 100


def counts() -> dict[str, int]:
    reaped()
    torch.accelerator.synchronize()
    stats = backend().stats()
    return {
        "communicators": accelerator.live_communicators(),
        "threads": len(stats["threads"]),
        "all threads": len(os.listdir("/proc/self/task")),
        "descriptors": stats["descriptors"],
        "stuck": stats["stuck_threads"],
        "MiB on the heap": heap_bytes() >> 20,
        "device": accelerator.device_bytes(),
    }


SLACK = {"communicators": 1, "all threads": 2, "descriptors": 3, "MiB on the heap": 4}
SETTLES_WITHIN = 10.0  # seconds
DEVICE_SLACK = 8 if accelerator.simulated() else 64 << 20  # allocations; bytes


def grown(then: dict[str, int], now: dict[str, int]) -> list[str]:
    slack = {**SLACK, "device": DEVICE_SLACK}
    return [name for name, count in now.items() if count > then[name] + slack.get(name, 0)]


def settled_counts(then: dict[str, int]) -> dict[str, int]:
    """Counts now; what goes in the background, connections of ended generations say, gets the
    time."""
    limit = time.monotonic() + SETTLES_WITHIN
    while grown(then, now := counts()) and time.monotonic() < limit:
        time.sleep(0.05)
    return now


def abort_in_mid_operation() -> None:
    """Only rank 0 issues: it is under way when the generation ends."""
    work = dist.all_reduce(ones(1000), async_op=True)
    abort()
    assert failure_of(work.check).type == "CommAbortedError"


@BOTH_KINDS
def test_generations_leave_no_thread_descriptor_memory_or_communicator(devices):
    world = devices.world(2)
    for number in range(GENERATIONS):
        if number == 5:  # pools and allocators are as large as they will be
            before = world.run(counts)
        world = devices.next(world, range(2))
        world.run(check_sum)
        if number % 2:
            world.on(0, abort_in_mid_operation)
            world.run(wait_errored)
    world = devices.next(world, range(2))
    world.run(check_sum)
    after = [world.on(rank, settled_counts, then) for rank, then in enumerate(before)]
    record(f"{GENERATIONS} generations", before=before, after=after)
    for then, now in zip(before, after, strict=True):
        assert not grown(then, now), (grown(then, now), then, now)


def sum_in_a_handler_too() -> None:
    """A first sum, whose communicator takes until the other rank comes; and one more in a signal's
    handler meanwhile."""

    def handler(*_: object) -> None:
        kept["told"] = failure_of(lambda: dist.all_reduce(ones(3)))

    before = signal.signal(signal.SIGUSR2, handler)
    check_sum()
    signal.signal(signal.SIGUSR2, before)
    no_violation()


def told_in_the_handler() -> str:
    wait_until(lambda: "told" in kept, "the signal's handler")
    return kept.pop("told").text


def test_operation_in_a_signals_handler_is_refused_where_it_would_wait_for_itself(devices):
    world = devices.world(2)
    call = world.start_blocked(0, sum_in_a_handler_too)
    os.kill(world.workers[0].pid, signal.SIGUSR2)
    assert "a signal's handler must not use" in world.side(0, told_in_the_handler)
    world.on(1, check_sum)
    call.value()
