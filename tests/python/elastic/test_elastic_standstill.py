"""Elastic jobs whose views come to nothing: which of them end in an error, and on which member."""

from __future__ import annotations

import threading
from time import monotonic

import pytest
import torch
import torch.distributed as dist
from elastic_side import come, jobs, members, recover, wait_for_newcomer
from ranks import World
from rankside import failure_of, kept, wait_until

import torchft_ext
from torchft_ext import elastic

world = members(3)


def two_founders(ranks, world) -> tuple[str, World]:
    address = ranks.address()
    founders = World(ranks, world.workers[:2])
    founders.run(come, address, 2)
    return address, founders


# ---- causes that pass


def manage_what_fails(error: str, times: int) -> None:
    """A rule that raises this error in the first views."""
    kept["views"] = []

    def rule(view: elastic.View) -> list[int]:
        kept["views"].append(view.number)
        if len(kept["views"]) <= times:
            raise getattr(torchft_ext, error)("it will pass")
        return list(range(view.size))

    jobs[0].manage("all", rule=rule)


@pytest.mark.parametrize(
    "error", ["CommTimeoutError", "CommAbortedError", "PeerLeftError", "PeerLostError"]
)
def test_views_that_fail_by_what_passes_are_followed_by_others(ranks, world, error):
    _, founders = two_founders(ranks, world)
    founders.run(manage_what_fails, error, 5)
    assert sorted(founders.run(recover)) == [0, 1]


def pauses_before_recovering() -> float:
    """Return how long recover() takes, in seconds."""
    began = monotonic()
    jobs[0].recover()
    return monotonic() - began


def test_losses_of_a_member_that_stays_are_slowed_down_as_other_causes_are(ranks, world):
    alone = World(ranks, world.workers[:1])
    alone.run(come, ranks.address(), 1)
    alone.run(manage_what_fails, "PeerLostError", 3)
    assert alone.on(0, pauses_before_recovering) > 0.2 + 0.4  # before the third and fourth view


# ---- a newcomer that runs another program


def add_up_with_all() -> None:
    """A step that all agree on."""
    jobs[0].recover()
    dist.all_reduce(torch.ones(1))
    assert jobs[0].agree(True).ok


def add_up_until_alone_again() -> int:
    """Go from view to view while a newcomer spoils them; return how many were spoilt."""
    spoilt = 0
    while True:
        view = jobs[0].recover()
        try:
            dist.all_reduce(torch.ones(1))
        except torchft_ext.CommError:
            spoilt += 1
        else:
            if view.size == 2:
                return spoilt


def add_up_something_else() -> str:
    """Return why this member gives up."""
    try:
        while True:
            jobs[0].recover()
            failure_of(lambda: dist.all_reduce(torch.ones(3)))
    except elastic.NoProgressError as error:
        jobs[0].close()
        return str(error)


def test_a_wrong_newcomer_gives_up_and_the_others_go_on(ranks, world):
    address, founders = two_founders(ranks, world)
    founders.run(add_up_with_all)
    world.on(2, come, address, 2)
    late = world.start(2, add_up_something_else)
    founders.side(0, wait_for_newcomer)
    # A founder does not count a view that ends before it has formed.
    assert max(founders.run(add_up_until_alone_again)) >= 3
    assert "in 3 views in a row of the same 3 members" in late.value()


# ---- the pause before the next view


def close_during_the_pause() -> float:
    """Return how long a recover() that pauses for 2 s goes on after close()."""
    failures = []
    waiting = threading.Thread(target=lambda: failures.append(failure_of(jobs[0].recover)))
    waiting.start()
    wait_until(lambda: len(kept["views"]) == 6, "the sixth view")
    began = monotonic()
    jobs[0].close()
    waiting.join()
    # It is closed; or it was alone in a view that is decided without it meanwhile.
    assert failures[0].type in ("ElasticError", "LeftOutError"), failures
    return monotonic() - began


def test_close_ends_the_pause(ranks, world):
    alone = World(ranks, world.workers[:1])
    alone.run(come, ranks.address(), 1)
    alone.run(manage_what_fails, "CommError", 100)
    assert alone.on(0, close_during_the_pause) < 1


# ---- names that are cut


def manage_a_name_of(letter: str) -> None:
    jobs[0].manage(letter * 150, dist.new_group([0]))


def why_no_progress() -> str:
    """Return why this member gives up; empty: another one did first, and it is alone."""
    try:
        jobs[0].recover()
    except elastic.NoProgressError as error:
        jobs[0].close()
        return str(error)
    return ""


def test_long_names_that_differ_are_told_in_whole_characters(ranks, world):
    _, founders = two_founders(ranks, world)
    for rank, letter in enumerate("äö"):
        founders.on(rank, manage_a_name_of, letter)
    texts = [text for text in founders.run(why_no_progress) if text]
    assert texts
    for text in texts:
        assert "expected the same on all members" in text
        assert "\N{REPLACEMENT CHARACTER}" not in text
