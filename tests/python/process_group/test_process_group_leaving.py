"""Members that leave, or begin another generation, over backends that do not tell of it."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from process_group_side import (
    LIMIT,
    await_blocked,
    await_failure,
    join,
    join_failing,
    leave,
    own,
    start_blocked,
    world_of,
)
from ranks import World, values_of
from rankside import ErrorInfo, failure_of, kept, wait_until
from timing import AT_ONCE, assert_within

from torchft_ext import _pg_generation
from torchft_ext import process_group as pgs


@pytest.mark.parametrize("kind", ["Gloo", "BabyHost", "BabyGloo"])
def test_leaving_member_is_named_to_all_that_wait_for_it(ranks, kind):
    """Though the backend sees a closed connection first, and the last to leave ends at once."""

    def times() -> list[float]:
        world = world_of(ranks, 3, kind)
        calls = start_blocked(world, 2)
        began = time.monotonic()
        world.side(2, leave)
        found = values_of(calls)
        assert [error.type for error, _ in found] == ["PeerLeftError"] * 2
        assert ["rank 2" in error.text for error, _ in found] == [True] * 2
        for rank in (0, 1):
            world.on(rank, leave)
        return [error.at - began for error, _ in found]

    assert_within(AT_ONCE, times)


def exchanged(peer: int) -> float:
    """A message to and from the other rank."""
    group, mine, theirs = kept["group"], own(), torch.empty(4)
    sent = group.send([mine], peer, 0)
    group.recv([theirs], peer, 0).wait()
    sent.wait()
    return theirs[0].item()


def failed_sum() -> tuple[str, str]:
    """Of a sum, and of the group after it."""
    error = failure_of(lambda: kept["group"].allreduce([own()]).wait())
    assert error is not None
    return error.type, type(kept["group"].errored()).__name__


@pytest.mark.parametrize("kind", ["Host", "Gloo", "BabyHost"])
def test_messages_of_others_go_on_after_a_member_has_left(ranks, kind):
    world = world_of(ranks, 3, kind)
    world.on(2, leave)
    for _ in range(2):
        calls = [world.start(rank, exchanged, 1 - rank) for rank in (0, 1)]
        assert values_of(calls) == [10.0, 0.0]
    calls = [world.start(rank, failed_sum) for rank in (0, 1)]
    assert values_of(calls) == [("PeerLeftError", "PeerLeftError")] * 2
    for rank in (0, 1):
        world.on(rank, leave)


def received_from(peer: int) -> ErrorInfo:
    error = failure_of(lambda: kept["group"].recv([own()], peer, 0).wait())
    assert error is not None
    return error


@pytest.mark.parametrize("kind", ["Gloo", "BabyHost"])
def test_message_of_a_member_that_leaves_ends_though_it_is_in_its_backend(ranks, kind):
    """The leaver waits for a message itself, so that gloo keeps its connections."""
    world = world_of(ranks, 2, kind)
    waiting = world.start(0, received_from, 1)
    giving_up = world.start(1, received_from, 0)
    for rank in (0, 1):
        world.side(rank, await_blocked)
    began = time.monotonic()
    world.side(1, leave)
    error = waiting.value()
    assert error.type == "PeerLeftError"
    assert error.at - began < LIMIT / 2
    giving_up.value()
    world.on(0, leave)


def backend_tells_first() -> None:
    """As where a connection is seen closed before the guard tells of the death."""
    generation = kept["group"]._formed.generation
    wait_until(lambda: generation.leaving() is not None, "the leaving")
    _pg_generation._OTHER_DEATH_IS_TOLD, _pg_generation._DEATH_IS_TOLD = LIMIT, 0.0
    (operation,) = generation._pending
    generation.report(operation, RuntimeError("Connection closed by peer"))


def usual_times(of_another: float, death_is_told: float) -> None:
    _pg_generation._OTHER_DEATH_IS_TOLD, _pg_generation._DEATH_IS_TOLD = of_another, death_is_told


def test_death_after_a_leaving_is_told_as_a_death(ranks):
    world = world_of(ranks, 3)
    world.on(2, leave)
    waiting = world.start(0, received_from, 1)
    world.side(0, await_blocked)
    world.side(0, backend_tells_first)
    world.kill(1)
    error = waiting.value()
    usual = _pg_generation._OTHER_DEATH_IS_TOLD, _pg_generation._DEATH_IS_TOLD
    world.on(0, usual_times, *usual)
    assert (error.type, error.cause["rank"]) == ("PeerLostError", 1)
    world.on(0, leave)


def leave_within(*_: object) -> None:
    kept["group"].shutdown()
    raise RuntimeError("left")


def join_and_leave(address: str, rank: int, size: int) -> None:
    """This rank leaves while its gloo is being made."""
    pgs.declare_backend("leaving", pgs.BackendCapabilities(make=leave_within))
    kept["group"] = pgs.ProcessGroupBackend("leaving", LIMIT)
    failure_of(lambda: kept["group"].configure(address, rank, size))


def test_leaving_while_gloo_connects_ends_configure(ranks):
    world, address = World(ranks, ranks.borrow(3)), ranks.address()
    world.start(2, join_and_leave, address, 2, 3)
    began = time.monotonic()
    calls = [world.start(rank, join_failing, address, rank, 3) for rank in range(2)]
    found = values_of(calls)
    assert {error.type for error in found} <= {"PeerLeftError", "CommAbortedError"}
    assert all(error.at - began < LIMIT / 2 for error in found)
    world.run(leave)


def generation_after_a_leaving() -> bool:
    """Whether a generation goes with its group, without a collection of cycles."""
    gc.collect()
    gc.disable()
    try:
        wait_until(lambda: kept["group"]._formed.generation.leaving() is not None, "the leaving")
        watched = weakref.ref(kept["group"]._formed.generation)
        kept.pop("group").shutdown()
        wait_until(lambda: watched() is None, "the end of the generation")
    finally:
        gc.enable()
    return True


def test_generation_that_a_member_left_is_in_no_cycle(ranks):
    world = world_of(ranks, 2)
    world.on(1, leave)
    assert world.on(0, generation_after_a_leaving)


def go_through_generations(address: str, rank: int, size: int, count: int) -> list[float]:
    """In each one sum; who has it begins the next generation at once."""
    sums = []
    for number in range(count):
        join("Gloo", f"{address}/{number}", rank, size)
        tensor = torch.full((2**18,), 1.0)
        kept["group"].allreduce([tensor]).wait()
        sums.append(tensor[-1].item())
    return sums


def test_slower_members_complete_the_last_operation_of_those_that_went_on(ranks):
    world, address = World(ranks, ranks.borrow(3)), ranks.address()
    calls = [world.start(r, go_through_generations, address, r, 3, 20) for r in range(3)]
    assert values_of(calls) == [[3.0] * 20] * 3
    world.run(leave)


def drop() -> None:
    """Without shutdown()."""
    del kept["group"]
    gc.collect()


def test_members_learn_of_a_group_that_was_dropped(ranks):
    world = world_of(ranks, 2)
    world.on(0, drop)
    assert world.on(1, await_failure).type in ("PeerLeftError", "PeerLostError", "CommAbortedError")
    world.on(1, leave)
