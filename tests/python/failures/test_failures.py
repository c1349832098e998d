"""Deaths, aborts, timeouts and mismatches: every rank is released, with an error that says why."""

from __future__ import annotations

import re
import socket
import time

import pytest
import torch
import torch.distributed as dist
from ranks import values_of
from rankside import (
    OPERATION_LIMIT,
    abort,
    abort_from_many_threads,
    backend,
    errored,
    kept,
    seconds,
    wait_errored,
)
from timing import AT_ONCE, assert_within
from values import LARGE, check, check_sum, me

NOTICE = 10.0  # seconds in which a failure must have reached everyone


def blocking_all_reduce() -> None:
    dist.all_reduce(torch.ones(1000))


def blocking_recv() -> None:
    dist.recv(torch.ones(1000), (me()[0] + 1) % me()[1])


def blocking_recv_from_anyone() -> None:
    dist.recv(torch.ones(1000))


def blocking_send() -> None:
    dist.send(torch.ones(LARGE), (me()[0] + 1) % me()[1])


def blocking_barrier() -> None:
    dist.barrier()


def parts() -> list[torch.Tensor]:
    return [torch.ones(1000) for _ in range(me()[1])]


# Each of these needs the parts of others at the rank that calls it.
def blocking_broadcast() -> None:
    dist.broadcast(torch.ones(1000), (me()[0] + 1) % me()[1])


def blocking_reduce() -> None:
    dist.reduce(torch.ones(1000), me()[0])


def blocking_gather() -> None:
    dist.gather(torch.ones(1000), parts(), me()[0])


def blocking_scatter() -> None:
    dist.scatter(torch.ones(1000), None, (me()[0] + 1) % me()[1])


def blocking_all_gather() -> None:
    dist.all_gather(parts(), torch.ones(1000))


def blocking_all_gather_into_tensor() -> None:
    dist.all_gather_into_tensor(torch.ones(1000 * me()[1]), torch.ones(1000))


def blocking_reduce_scatter() -> None:
    dist.reduce_scatter(torch.ones(1000), parts())


def blocking_reduce_scatter_tensor() -> None:
    dist.reduce_scatter_tensor(torch.ones(1000), torch.ones(1000 * me()[1]))


def blocking_all_to_all() -> None:
    dist.all_to_all(parts(), parts())


def blocking_all_to_all_single() -> None:
    whole = torch.ones(1000 * me()[1])
    dist.all_to_all_single(torch.ones_like(whole), whole)


def blocking_future() -> None:
    dist.all_reduce(torch.ones(1000), async_op=True).get_future().wait()


def forever_large() -> None:
    while True:
        dist.all_reduce(torch.ones(LARGE))


BLOCKING = (
    blocking_all_reduce,
    blocking_recv,
    blocking_recv_from_anyone,
    blocking_send,
    blocking_barrier,
    blocking_future,
    blocking_broadcast,
    blocking_reduce,
    blocking_gather,
    blocking_scatter,
    blocking_all_gather,
    blocking_all_gather_into_tensor,
    blocking_reduce_scatter,
    blocking_reduce_scatter_tensor,
    blocking_all_to_all,
    blocking_all_to_all_single,
)


@pytest.mark.parametrize("victim", (0, 1, 3))
def test_sigkill_in_allreduce_is_told_to_all_survivors_who_continue_without(ranks, victim):
    world = ranks.world(4)
    survivors = [rank for rank in range(4) if rank != victim]
    blocked = [world.start_blocked(rank, blocking_all_reduce) for rank in survivors]
    pid = world.workers[victim].pid
    world.kill(victim)
    killed = time.monotonic()
    errors = [call.error("PeerLostError") for call in blocked]
    assert time.monotonic() - killed < NOTICE
    for rank, error in zip(survivors, errors, strict=True):
        assert error.cause["rank"] == victim and error.cause["pid"] == pid, error.text
        assert error.cause["host"] == socket.gethostname()
        assert (error.fields["rank"], error.fields["size"]) == (rank, 4)
        assert error.fields["op"] == "allreduce" and error.fields["limit"] == OPERATION_LIMIT
    world.next(survivors).run(check_sum)


def test_sigkill_during_a_transfer_is_told_to_all_survivors(ranks):
    world = ranks.world(4)
    calls = [world.start_blocked(rank, forever_large) for rank in range(4)]
    world.kill(2)
    for rank in (0, 1, 3):
        error = calls[rank].error("PeerLostError", patience=NOTICE)
        assert error.cause["rank"] == 2
    world.next([0, 1, 3]).run(check_sum)


def test_sigkill_of_a_peer_fails_an_idle_generation(ranks):
    world = ranks.world(3)
    world.kill(1)
    for rank in (0, 2):
        error = world.on(rank, wait_errored)
        assert error.type == "PeerLostError" and error.cause["rank"] == 1
    world.next([2, 0]).run(check_sum)


def test_two_deaths_at_once_leave_a_world_that_can_go_on(ranks):
    world = ranks.world(4)
    blocked = [world.start_blocked(rank, blocking_all_reduce) for rank in (0, 2)]
    world.kill(1)
    world.kill(3)
    for call in blocked:
        assert call.error("PeerLostError").cause["rank"] in (1, 3)
    world.next([0, 2]).run(check_sum)


def times_of_an_abort(ranks, blocking, strike, *how: object) -> list[float]:
    """Of rank 0's, until it has returned and until each rank is released; None: none is blocked."""
    world = ranks.world(3)
    blocked = [world.start_blocked(0, blocking)] if blocking else []
    idle = [world.start(rank, wait_errored) for rank in range(len(blocked), 3)]
    began, returned = world.side(0, strike, *how)
    errors = [call.error("CommAbortedError", patience=NOTICE) for call in blocked]
    errors += values_of(idle, patience=NOTICE)
    why = re.search(r"enough of this|striker \d", errors[0].text)[0]
    for error in errors:
        assert error.type == "CommAbortedError" and error.cause["rank"] == 0, error.text
        assert why in error.text
    world.next().run(check_sum)
    return [returned - began, *(error.at - began for error in errors)]


@pytest.mark.parametrize("operation", BLOCKING, ids=lambda operation: operation.__name__)
def test_abort_from_another_thread_releases_everyone(ranks, operation):
    assert_within(AT_ONCE, lambda: times_of_an_abort(ranks, operation, abort, "enough of this"))


def test_abort_of_one_rank_releases_those_blocked_in_the_same_operation(ranks):
    def times() -> list[float]:
        world = ranks.world(3)
        blocked = [world.start_blocked(rank, blocking_all_reduce) for rank in (0, 1)]
        began, returned = world.on(2, abort)
        errors = [call.error("CommAbortedError", patience=NOTICE) for call in blocked]
        assert [error.cause["rank"] for error in errors] == [2, 2]
        return [returned - began, *(error.at - began for error in errors)]

    assert_within(AT_ONCE, times)


def abort_twice_while_idle() -> None:
    backend().abort("first")
    backend().abort("second")
    error = backend().errored()
    assert type(error).__name__ == "CommAbortedError" and "first" in str(error), error


def others_are_told(world, why: str) -> None:
    """That rank 0 aborted, and why: all other ranks, which are idle, within the limit."""
    for rank in range(1, world.size):
        error = world.start(rank, wait_errored).value(patience=NOTICE)
        assert error.type == "CommAbortedError" and error.cause["rank"] == 0, error.text
        assert why in error.text


def test_abort_while_idle_is_idempotent_and_the_first_reason_stays(ranks):
    world = ranks.world(3)
    world.start(0, abort_twice_while_idle).value(patience=NOTICE)
    others_are_told(world, "first")
    world.next().run(check_sum)


@pytest.mark.parametrize("operation", (None, blocking_all_reduce, blocking_recv))
def test_aborts_at_the_same_moment_all_return_and_one_reason_is_told(ranks, operation):
    how = (operation, abort_from_many_threads, 8)
    assert_within(AT_ONCE, lambda: times_of_an_abort(ranks, *how))


def test_aborts_of_two_ranks_at_the_same_moment_release_everyone(ranks):
    def times() -> list[float]:
        world = ranks.world(3)
        blocked = [world.start_blocked(rank, blocking_all_reduce) for rank in (0, 1)]
        idle = world.start(2, wait_errored)
        aborts = values_of([world.start_side(rank, abort) for rank in (0, 1)], patience=NOTICE)
        errors = [call.error("CommAbortedError", patience=NOTICE) for call in blocked]
        errors.append(idle.value(patience=NOTICE))
        for error in errors:
            assert error.type == "CommAbortedError" and error.cause["rank"] in (0, 1), error.text
        world.next().run(check_sum)
        first = min(began for began, _ in aborts)
        own = [returned - began for began, returned in aborts]
        return [*own, *(error.at - first for error in errors)]

    assert_within(AT_ONCE, times)


def operations_of_a_failed_generation() -> None:
    import torchft_ext

    backend().abort("before the others")
    tensor = torch.full((5,), 7.0)
    work = dist.all_reduce(tensor, async_op=True)  # does not raise
    future = work.get_future()
    with pytest.raises(torchft_ext.CommAbortedError):
        work.wait()
    assert work.is_completed()
    assert future.done()
    with pytest.raises(torchft_ext.CommAbortedError):
        dist.all_reduce(tensor, async_op=True).get_future().wait()
    for action in (blocking_barrier, blocking_recv, blocking_send, blocking_all_reduce):
        with pytest.raises(torchft_ext.CommAbortedError):
            action()
    check(tensor, torch.full((5,), 7.0), "the buffer of failed operations")


def test_later_operations_return_failed_works_and_touch_nothing(ranks):
    world = ranks.world(2)
    world.on(0, operations_of_a_failed_generation)
    world.next().run(check_sum)


def operation_with_limit(limit: float) -> None:
    backend().set_timeout(seconds(limit))
    blocking_all_reduce()


def test_operation_timeout_is_told_to_everyone_and_names_who_ran_out(ranks):
    world = ranks.world(3)
    patient = world.start_blocked(1, blocking_all_reduce)
    own = world.start(0, operation_with_limit, 0.5).error("CommTimeoutError")
    assert own.fields["limit"] == 0.5 and own.fields["elapsed"] >= 0.5
    assert own.fields["op"] == "allreduce" and "0.5" in own.text
    told = patient.error("CommTimeoutError", patience=NOTICE)
    idle = world.on(2, wait_errored)
    assert idle.type == "CommTimeoutError"
    assert told.cause["rank"] == 0 and idle.cause["rank"] == 0
    world.next().run(check_sum)


def recv_with_argument(limit: float) -> None:
    work = dist.irecv(torch.ones(3), 1)
    work.wait(seconds(limit))


def test_timeout_given_to_wait_raises_and_releases(ranks):
    world = ranks.world(2)
    error = world.start(0, recv_with_argument, 0.3).error("CommTimeoutError", patience=NOTICE)
    assert error.fields["limit"] == 0.3 and error.fields["elapsed"] >= 0.3, error.text
    world.next().run(check_sum)


MISMATCHES = {
    "count": ("torch.ones(4)", "torch.ones(5)"),
    "dtype": ("torch.ones(4)", "torch.ones(4, dtype=torch.int32)"),
    "large_count": ("torch.ones(1 << 20)", "torch.ones((1 << 20) + 1)"),
}


def sum_of(expression: str) -> None:
    dist.all_reduce(eval(expression, {"torch": torch}))


@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_sum_different_tensors_get_a_mismatch_error(ranks, case):
    world = ranks.world(2)
    calls = [world.start(rank, sum_of, MISMATCHES[case][rank]) for rank in range(2)]
    for call in calls:
        assert "allreduce" in call.error("MismatchError", patience=NOTICE).text
    world.next().run(check_sum)


# A root is done when its bytes are on their way: the operation after it, at the latest, tells all.
def sum_or_broadcast(broadcast: bool) -> None:
    if broadcast:
        dist.broadcast(torch.ones(4), 0)
    else:
        dist.all_reduce(torch.ones(4))
    dist.barrier()


def sum_or_max(op: str) -> None:
    dist.all_reduce(torch.ones(4), getattr(dist.ReduceOp, op))
    dist.barrier()


def broadcast_from(root: int) -> None:
    dist.broadcast(torch.ones(4), root)
    dist.barrier()


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [(sum_or_broadcast, (True, False)), (sum_or_max, ("SUM", "MAX")), (broadcast_from, (0, 1))],
    ids=["kind", "reduction", "root"],
)
def test_ranks_that_issue_different_operations_get_a_mismatch_error(ranks, operation, arguments):
    world = ranks.world(2)
    calls = [world.start(rank, operation, arguments[rank]) for rank in range(2)]
    for call in calls:
        call.error("MismatchError", patience=NOTICE)
    world.next().run(check_sum)


def message_of(size: int) -> None:
    if me()[0] == 0:
        dist.send(torch.ones(size), 1)
    else:
        dist.recv(torch.ones(size), 0)


def test_recv_of_another_size_than_the_send_gets_a_mismatch_error(ranks):
    world = ranks.world(2)
    calls = [world.start(0, message_of, 6), world.start(1, message_of, 9)]
    for call in calls:
        call.error("MismatchError", patience=NOTICE)
    world.next().run(check_sum)


def begin_recv(size: int) -> None:
    kept["buffer"] = torch.zeros(size)
    kept["work"] = dist.irecv(kept["buffer"], 1)


def buffer_is(value: float) -> bool:
    return bool((kept["buffer"] == value).all())


def abort_and_refill(value: float) -> None:
    backend().abort("take the buffer back")
    kept["buffer"].fill_(value)


def send_or_fail(size: int) -> None:
    try:
        dist.send(torch.full((size,), 5.0), 0)
    except dist.DistBackendError:
        pass  # the receiver may have aborted already


def test_nothing_is_written_into_the_buffer_of_an_aborted_recv(ranks):
    world = ranks.world(2)
    for _ in range(5):
        world.on(0, begin_recv, LARGE)
        sending = world.start(1, send_or_fail, LARGE)
        world.on(0, abort_and_refill, 9.0)
        sending.value()
        world = world.next()
        world.run(check_sum)
        assert world.on(0, buffer_is, 9.0)


def begin_sums(count: int) -> None:
    kept["sums"] = [torch.ones(LARGE) for _ in range(count)]
    kept["works"] = [dist.all_reduce(tensor, async_op=True) for tensor in kept["sums"]]


def abort_sums_and_refill() -> None:
    backend().abort("take the buffers back")
    assert all(work.is_completed() for work in kept["works"])
    for tensor in kept["sums"]:
        tensor.fill_(9.0)


def sums_are(value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in kept["sums"])


def test_nothing_is_written_into_the_buffers_of_aborted_sums(ranks):
    world = ranks.world(3)
    for _ in range(5):
        world.run(begin_sums, 6)
        world.on(0, abort_sums_and_refill)
        world = world.next()
        world.run(check_sum)
        assert world.on(0, sums_are, 9.0)


def test_errored_is_none_in_a_new_generation(ranks):
    world = ranks.world(2)
    world.on(1, abort)
    assert world.on(0, wait_errored).type == "CommAbortedError"
    assert world.next().run(errored) == [None, None]


def test_frozen_peer_fails_the_generation_after_the_heartbeat_limit(ranks):
    world = ranks.world(3, heartbeat=seconds(3))
    blocked = [world.start_blocked(rank, blocking_all_reduce) for rank in (0, 2)]
    world.freeze(1)
    for call in blocked:
        error = call.error("PeerLostError", patience=10)
        assert error.cause["rank"] == 1
    world.next([0, 2], heartbeat=seconds(3)).run(check_sum)


def test_thawed_rank_learns_that_its_generation_went_on_without_it(ranks):
    world = ranks.world(3, heartbeat=seconds(3))
    blocked = world.start_blocked(0, blocking_all_reduce)
    world.freeze(1)
    assert blocked.error("PeerLostError", patience=10).cause["rank"] == 1
    world.on(2, wait_errored)  # else its final frames to the frozen one are of its next generation
    world.next([0, 2], heartbeat=seconds(3)).run(check_sum)
    world.thaw(1)
    assert world.on(1, wait_errored).type in (
        "PeerLostError",
        "PeerLeftError",
        "ConnectionLostError",
    )
    world.next([0, 2, 1], heartbeat=seconds(3)).run(check_sum)


def kinds_of_errors() -> dict[str, bool]:
    import torchft_ext

    names = "PeerLost PeerLeft ConnectionLost CommTimeout CommAborted StoreLost Mismatch Rendezvous"
    kinds = [getattr(torchft_ext, name + "Error") for name in names.split()]
    assert issubclass(torchft_ext.CommError, dist.DistBackendError)
    return {kind.__name__: issubclass(kind, torchft_ext.CommError) for kind in kinds}


def test_all_errors_are_comm_errors_and_backend_errors(ranks):
    assert all(ranks.world(1).on(0, kinds_of_errors).values())


def test_failures_are_counted_by_kind_in_stats(ranks):
    world = ranks.world(2)
    before = world.on(0, failures)
    world.on(0, abort)
    after = world.on(0, failures)
    assert sum(after.values()) == sum(before.values()) + 1
    assert [name for name in after if after[name] != before.get(name, 0)] == ["aborted"]


def failures() -> dict[str, int]:
    return dict(backend().stats()["failures"])
