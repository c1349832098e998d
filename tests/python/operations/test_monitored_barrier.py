"""monitored_barrier(): rank 0 names who did not come, in the words of torch's gloo."""

from __future__ import annotations

import datetime
import re
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from rankside import (
    OPERATION_LIMIT,
    ErrorInfo,
    backend,
    errored,
    failure_of,
    main_thread_waits_in_c,
    seconds,
    wait_errored,
)
from test_failures import blocking_all_reduce
from values import check_sum

LIMIT = 0.5  # seconds
# What others take to hear of it, on a busy machine.
SOON = OPERATION_LIMIT / 2


def barrier(limit: float | None = LIMIT, wait_all_ranks: bool = False) -> ErrorInfo | None:
    timeout = None if limit is None else seconds(limit)
    return failure_of(lambda: dist.monitored_barrier(None, timeout, wait_all_ranks))


def everyone_comes() -> None:
    for wait_all_ranks in (False, True):
        assert barrier(OPERATION_LIMIT, wait_all_ranks) is None
        check_sum()
    assert barrier(None) is None
    assert errored() is None


@pytest.mark.parametrize("size", (1, 2, 3, 5))
def test_all_pass_when_all_come(ranks, size):
    ranks.world(size).run(everyone_comes)


@pytest.mark.parametrize(
    ("wait_all_ranks", "words"),
    [(False, "Rank 1 failed to pass"), (True, "Ranks 1, 3 failed to pass")],
)
def test_rank_zero_names_who_stays_away(ranks, wait_all_ranks, words):
    world = ranks.world(4)
    calls = {rank: world.start(rank, barrier, LIMIT, wait_all_ranks) for rank in (0, 2)}
    error = calls[0].value()
    assert error.type == "CommTimeoutError"
    assert f"[Rank 0]: {words} monitoredBarrier in 500 ms" in error.text, error.text
    assert LIMIT <= error.fields["elapsed"] < SOON and error.fields["op"] == "monitored_barrier"
    assert_reached(calls[2].value(), 2, words)
    for rank in (1, 3):
        assert words in world.on(rank, wait_errored).text
    world.next().run(check_sum)


def assert_reached(error: ErrorInfo, rank: int, words: str) -> None:
    """Of a rank that came; it need not wait for its own time."""
    reached = (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
        "send/recv from rank 0. Please check rank 0 logs for faulty rank"
    )
    assert reached in error.text and words in error.text, error.text
    assert error.cause["rank"] == 0 and error.fields["elapsed"] < SOON


def test_ranks_that_are_inside_a_collective_are_named(ranks):
    world = ranks.world(3)
    others = [world.start_blocked(rank, blocking_all_reduce) for rank in (1, 2)]
    error = world.on(0, barrier, LIMIT, True)
    assert "Ranks 1, 2 failed to pass monitoredBarrier" in error.text
    for call in others:
        assert "Ranks 1, 2 failed" in call.error("CommTimeoutError").text


def test_rank_that_comes_late_is_told_why(ranks):
    world = ranks.world(2)
    assert "Rank 1 failed" in world.on(0, barrier).text
    world.on(1, wait_errored)
    assert_reached(world.on(1, barrier), 1, "[Rank 0]: Rank 1 failed to pass")


@pytest.mark.parametrize("wait_all_ranks", (False, True))
def test_rank_that_dies_is_named_at_once(ranks, wait_all_ranks):
    world = ranks.world(3)
    calls = [world.start_blocked(rank, barrier, OPERATION_LIMIT, wait_all_ranks) for rank in (0, 1)]
    world.kill(2)
    error = calls[0].value()
    assert error.type == "PeerLostError" and error.cause["rank"] == 2
    # Rank 1's word may still be on its way.
    words = "Ranks? (1, )?2" if wait_all_ranks else "Rank [12]"
    assert re.search(rf"\[Rank 0\]: {words} failed to pass monitoredBarrier", error.text), (
        error.text
    )
    assert "its process ended" in error.text
    assert calls[1].value().type == "PeerLostError"


def test_rank_that_leaves_is_named_at_once(ranks):
    world = ranks.world(2)
    call = world.start_blocked(0, barrier, OPERATION_LIMIT)
    assert world.workers[1].exit() == 0
    error = call.value()
    assert error.type == "PeerLeftError"
    assert "[Rank 0]: Rank 1 failed to pass monitoredBarrier" in error.text


def zero_limit() -> ErrorInfo | None:
    began = time.monotonic()
    error = barrier(0)
    assert time.monotonic() - began < SOON
    return error


def test_rank_that_stops_for_a_while_before_its_answer_passes(ranks):
    world = ranks.world(3)
    calls = [world.start_blocked(rank, barrier, OPERATION_LIMIT) for rank in (0, 1)]
    time.sleep(0.5)  # so that rank 0 has its report
    world.freeze(1)
    calls.append(world.start(2, barrier, OPERATION_LIMIT))
    time.sleep(2.0)
    world.thaw(1)
    assert [call.value() for call in calls] == [None, None, None]


def test_zero_limit_runs_out_at_once(ranks):
    error = ranks.world(3).on(0, zero_limit)
    assert re.search("Rank 0 timed out in monitoredBarrier after 0 ms", error.text), error.text


def short_group_limit() -> ErrorInfo | None:
    backend().set_timeout(seconds(LIMIT))
    return barrier(None)


def test_no_limit_means_that_of_the_group(ranks):
    error = ranks.world(2).on(0, short_group_limit)
    assert "Rank 1 failed to pass monitoredBarrier in 500 ms" in error.text


def test_rank_zero_that_stays_away_is_named(ranks):
    error = ranks.world(2).on(1, short_group_limit)
    assert "Rank 1 successfully reached monitoredBarrier" in error.text
    assert error.type == "CommTimeoutError" and error.cause["rank"] == 1
    assert LIMIT < error.fields["elapsed"] < SOON


def test_signal_leaves_the_barrier_and_ends_the_generation(ranks):
    world = ranks.world(3)
    others = world.start_blocked(1, barrier, OPERATION_LIMIT)
    call = world.start_blocked(0, plain_barrier)
    world.side(0, main_thread_waits_in_c)
    world.interrupt(0)
    call.error("KeyboardInterrupt")
    assert others.value().type == "CommAbortedError"


def plain_barrier() -> None:
    dist.monitored_barrier(timeout=seconds(OPERATION_LIMIT))


def bad_limits() -> None:
    group = dist.group.WORLD
    for limit, kind in ((datetime.timedelta(seconds=-5), ValueError), ("soon", TypeError)):
        with pytest.raises(kind):
            dist.monitored_barrier(group, limit)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.monitored_barrier(group, OPERATION_LIMIT)  # torch takes a float for seconds
    assert len(caught) == 1
    check_sum()


def test_bad_limits_are_refused_before_anything_is_sent(ranks):
    ranks.world(1).run(bad_limits)


def subgroup_barrier() -> str | None:
    subgroup = dist.new_group([0, 1], backend="ft")
    if dist.get_rank() == 1:
        return None
    error = failure_of(lambda: dist.monitored_barrier(subgroup, seconds(LIMIT)))
    check_sum_without_one()
    return None if error is None else error.text


def check_sum_without_one() -> None:
    """The default group is as it was."""
    assert errored() is None


def test_only_the_members_of_a_group_take_part(ranks):
    texts = ranks.fresh(3).run(subgroup_barrier)
    assert "Rank 1 failed to pass monitoredBarrier" in texts[0]
    assert texts[1:] == [None, None]


def barriers_and_messages() -> None:
    """They do not meet the user's messages, whatever the tag."""
    rank, size = dist.get_rank(), dist.get_world_size()
    got = torch.zeros(1)
    receive = dist.irecv(got, (rank + 1) % size)
    assert barrier(OPERATION_LIMIT) is None
    dist.send(torch.full((1,), float(rank)), (rank - 1) % size)
    receive.wait()
    assert got.item() == (rank + 1) % size


def test_messages_under_way_do_not_disturb_it(ranks):
    ranks.world(3).run(barriers_and_messages)
