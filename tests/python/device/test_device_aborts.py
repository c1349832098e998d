"""abort() in each state that an operation on a device can be in: the stream is freed, and the next
kernel runs."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from device_side import (
    accelerator,
    check_sum,
    hold,
    let_go,
    no_violation,
    ones,
    reaped,
    stream_of_its_own,
    stream_waits_for,
)
from device_worlds import BOTH_KINDS
from ranks import values_of
from rankside import ErrorInfo, abort, configure, failure_of, kept, wait_errored
from records import record
from values import check, me

NOTICE = 20.0  # seconds in which a failure must have reached everyone
MODULE = torch.get_device_module

pytestmark = BOTH_KINDS


def queue_behind() -> list[torch.Tensor]:
    """Kernels on the current stream, and on another one that waits for it."""
    tensors = [ones(1000), ones(1000)]
    for _ in range(50):
        tensors[0].add_(1)
    other = stream_of_its_own()
    other.wait_stream(torch.accelerator.current_stream())
    with MODULE(accelerator.NAME).stream(other):
        tensors[1].add_(1)
    return tensors


def stuck_with_work_behind() -> tuple[ErrorInfo, float]:
    """The failure, and when the last kernel had run."""
    begun = ones(1000)
    work = dist.all_reduce(begun, async_op=True)
    stream_waits_for(work)
    behind = queue_behind()
    error = failure_of(work.check)
    torch.accelerator.synchronize()
    freed = time.monotonic()
    check(behind[0].cpu(), torch.full((1000,), 51.0), "on the same stream")
    check(behind[1].cpu(), torch.full((1000,), 2.0), "on another one")
    no_violation()
    return error, freed


def abort_now() -> float:
    began = time.monotonic()
    abort()
    return began


def test_abort_in_mid_operation_frees_all_that_is_queued_behind_it(devices):
    world = devices.world(2)
    world.run(check_sum)
    call = world.start_blocked(0, stuck_with_work_behind)
    aborted = world.side(0, abort_now)
    error, freed = call.value(NOTICE)
    assert error.type == "CommAbortedError", error.text
    record("abort to free stream, mid-operation", seconds=freed - aborted)
    devices.next(world, range(2)).run(check_sum)


def host_in_the_driver() -> float:
    """When a synchronous copy returns that waits for an operation which does not end by itself."""
    tensor = ones(1000)
    dist.all_reduce(tensor)
    assert tensor.cpu().shape == (1000,)
    return time.monotonic()


def test_abort_frees_a_host_that_waits_for_a_copy(devices):
    world = devices.world(2)
    world.run(check_sum)
    call = world.start_blocked(0, host_in_the_driver)
    time.sleep(0.2)  # it is in the copy, most likely
    aborted = world.side(0, abort_now)
    freed = call.value(NOTICE)
    record("abort to a host freed from a copy", seconds=freed - aborted)
    assert world.on(0, wait_errored).type == "CommAbortedError"
    devices.next(world, range(2)).run(check_sum)


def behind_a_stalled_stream() -> None:
    tensor = ones(1000)
    hold()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    tensor.add_(1)
    abort()
    assert failure_of(work.wait).type == "CommAbortedError"  # known by now
    let_go()
    torch.accelerator.synchronize()
    assert failure_of(work.check).type == "CommAbortedError"
    check(ones(3).add_(1).cpu(), torch.full((3,), 2.0), "the next kernel")
    reaped()
    no_violation()


def test_abort_before_the_stream_has_reached_the_operation_lets_it_drain(devices):
    world = devices.world(2)
    world.run(check_sum)
    world.start(0, behind_a_stalled_stream).value(NOTICE)
    devices.next(world, range(2)).run(check_sum)


def many_under_way() -> ErrorInfo:
    tensors = [ones(1000 + n) for n in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    stream_waits_for(works[-1])
    error = failure_of(works[-1].check)
    torch.accelerator.synchronize()
    assert [failure_of(work.check).type for work in works] == [error.type] * 20
    no_violation()
    return error


def test_abort_ends_every_one_of_many_operations_under_way(devices):
    world = devices.world(2)
    world.run(check_sum)
    call = world.start_blocked(0, many_under_way)
    world.side(0, abort)
    assert call.value(NOTICE).type == "CommAbortedError"
    devices.next(world, range(2)).run(check_sum)


def strided_broadcast() -> ErrorInfo:
    memory = ones(40, 60)
    tensor = memory[:, ::2]
    work = dist.broadcast(tensor, 0, async_op=True)
    error = failure_of(work.check)
    torch.accelerator.synchronize()
    check(memory[:, 1::2].cpu(), torch.ones(40, 30), "what lies between is not the tensor's")
    # NCCL's kernels leave what they hold when they are stopped; simulated ones, nothing.
    if accelerator.simulated():
        check(tensor.cpu(), torch.ones(40, 30), "nothing came, so nothing was stored")
    no_violation()
    return error


def test_aborted_broadcast_writes_into_nothing_but_its_strided_tensor(devices):
    world = devices.world(2)
    world.run(check_sum)
    call = world.start_blocked(1, strided_broadcast)
    world.side(1, abort)
    assert call.value(NOTICE).type == "CommAbortedError"
    devices.next(world, range(2)).run(check_sum)


# ---- graphs


def capture() -> None:
    """A graph of a kernel, an all_reduce and another kernel, over the generation of now."""
    check_sum()  # the communicator is made outside of it
    kept["tensor"], kept["graph"] = ones(100), accelerator.Graph()
    torch.accelerator.synchronize()
    with kept["graph"].capture():
        kept["tensor"].mul_(2)
        dist.all_reduce(kept["tensor"])
        kept["tensor"].add_(1)


def replay(times: int) -> None:
    tensor, expected, world = kept["tensor"], 1.0, me()[1]
    tensor.fill_(1)
    for _ in range(times):
        kept["graph"].replay()
        expected = expected * 2 * world + 1
    check(tensor.cpu(), torch.full((100,), expected), "after the replays")
    no_violation()


def replay_alone() -> tuple[ErrorInfo, float]:
    """The others do not replay theirs: it hangs on the stream until the generation ends."""
    kept["graph"].replay()
    after = ones(5).add_(1)
    error = wait_errored()
    torch.accelerator.synchronize()
    freed = time.monotonic()
    check(after.cpu(), torch.full((5,), 2.0), "the next kernel")
    kept["graph"].free()
    reaped()
    no_violation()
    return error, freed


def beside_a_capture(asynchronous: bool) -> str:
    """What an operation outside of an open capture says that holds one of its group."""
    check_sum()
    inside, outside, graph = ones(10), ones(10), accelerator.Graph()
    other = stream_of_its_own()
    torch.accelerator.synchronize()
    with graph.capture():
        work = dist.all_reduce(inside, async_op=asynchronous)
        with MODULE(accelerator.NAME).stream(other):
            error = failure_of(lambda: dist.all_reduce(outside))
        if asynchronous:
            work.wait()
    graph.free()
    check_sum()
    no_violation()
    return "" if error is None else error.text


def test_operation_beside_a_capture_that_holds_one_of_its_group_is_refused(devices):
    world = devices.world(2)
    for text in world.run(beside_a_capture, True):
        assert "graph capture" in text and "issue others" in text
    for text in world.run(beside_a_capture, False):
        assert "graph capture" in text and "issue others" in text


def free_graph() -> None:
    kept["graph"].free()


@pytest.mark.parametrize("size", (1, 2))
def test_captured_operation_is_replayed(devices, size):
    world = devices.world(size)
    world.run(capture)
    world.run(replay, 3)
    world.run(check_sum)  # and others run between replays
    world.run(replay, 2)
    world.run(free_graph)


@pytest.mark.parametrize("strike", ("abort", "kill", "configure"))
def test_end_of_the_generation_frees_a_stream_stuck_in_a_replay(devices, strike):
    world = devices.world(2)
    world.run(capture)
    world.run(replay, 2)
    call = world.start(0, replay_alone)
    if strike == "kill":
        began = time.monotonic()
        world.kill(1)
    elif strike == "configure":  # the peer's generation looks healthy there
        began = time.monotonic()
        world.on(1, configure, devices.pool.address(), 0, 1)
    else:
        began = world.side(0, abort_now)
    error, freed = call.value(NOTICE)
    assert error.type == ("PeerLostError" if strike == "kill" else "CommAbortedError")
    record(f"{strike} to free stream, captured graph", seconds=freed - began)
    if strike != "kill":
        world.on(1, free_graph)
        world = devices.next(world, range(2))
        world.run(capture)
        world.run(replay, 2)
        world.run(free_graph)


def abort_with_an_idle_graph() -> None:
    abort()
    torch.accelerator.synchronize()
    kept["graph"].free()
    reaped()


def test_abort_with_a_graph_that_is_not_running_waits_for_nobody(devices):
    world = devices.world(2)
    world.run(capture)
    world.start(0, abort_with_an_idle_graph).value(NOTICE)
    world.run(free_graph)
    devices.next(world, range(2)).run(check_sum)


def generation_beside_a_capture(address: str, rank: int, size: int, errors: str) -> str:
    """A generation ends and the next one begins while a graph of something else is captured.

    What spoilt the capture or the generation; empty: nothing did.
    """
    tensor, summed, works, graph = ones(10), ones(10), [], accelerator.Graph()
    torch.accelerator.synchronize()

    def next_generation() -> None:
        abort()
        reaped()
        configure(address, rank, size)
        works.append(dist.all_reduce(summed, async_op=True))

    def capture_beside_it() -> None:
        with graph.capture(errors), ThreadPoolExecutor(1) as beside:
            tensor.mul_(2)
            beside.submit(next_generation).result(NOTICE)

    error = failure_of(capture_beside_it)
    if error is None:
        works[0].wait()
        check(summed.cpu(), torch.full((10,), float(size)), "the next generation's sum")
        graph.replay()
        check(tensor.cpu(), torch.full((10,), 2.0), "the graph")
        no_violation()
    graph.free()
    return "" if error is None else error.text


@pytest.mark.parametrize("errors", ("thread_local", "global"))
def test_generation_ends_and_begins_beside_a_capture_of_something_else(devices, errors):
    world, address = devices.world(2), devices.pool.address()
    world.run(check_sum)
    calls = [
        world.start(rank, generation_beside_a_capture, address, rank, 2, errors)
        for rank in range(2)
    ]
    spoilt = values_of(calls)
    # NCCL frees pinned memory on threads of its own, whose capture mode nobody can relax: a capture
    # that counts the calls of all threads is spoilt by it, and spoils NCCL's call.
    record("a capture beside a new generation", errors=errors, spoilt=[t[:200] for t in spoilt])
    assert spoilt == ["", ""] or (errors == "global" and not accelerator.simulated())
    devices.next(world, range(2)).run(check_sum)
