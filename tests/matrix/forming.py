"""Strikes against a forming generation that need help to hit it.

A time limit runs out only where somebody does not come; a connection is cut in the millisecond of
its handshake only if it is cut again and again.
"""

from __future__ import annotations

import time

from matrix import lateness
from matrix.cases import (
    HANG,
    Case,
    Pool,
    begin_configuring,
    cut,
    expect_cause,
    expect_ends,
    expect_exact_sums,
    expect_how,
    expect_kind,
    expect_missing_named,
    missing_in,
)
from matrix.process import Event, MatrixError, RankProcess
from matrix.strikes import FORMING, PROBING, STORE_FORMING, STORE_KINDS, STRIKES

STRIKES_HERE = ("timeout", "cut_connection")
VICTIMS_LIMIT = (
    0.5  # seconds; of the configure() that runs out of time: a twentieth is for finding out why
)
CUT_EVERY = 0.003  # seconds
STORE_SILENCE = 3.0  # seconds; of a store that some members may still need
FORMING_BOUND = 0.3  # seconds more: another attempt might take the place of the broken one


def run_forming_case(pool: Pool, case: Case) -> float:
    """Run it; the seconds from the strike to the last release.

    Raises:
        MatrixError: something went otherwise than the table says; ranks may be in any state.
    """
    ranks = pool.take(case.world)
    pool.configure(ranks)
    released = (_time_out if case.strike == "timeout" else _cut)(pool, case, ranks)
    expect_exact_sums(pool, ranks)
    return released


def _time_out(pool: Pool, case: Case, ranks: list[RankProcess]) -> float:
    """One member never comes; the victim gives up first, and those who wait with it are told."""
    absent = case.world - 1 if case.victim != case.world - 1 else case.world - 2
    waiting = [index for index in range(case.world) if index != absent]
    victims_limit = VICTIMS_LIMIT * max(1.0, pool.scale)
    struck = lateness.Strike.now(ranks)
    pool.generations += 1
    for index in sorted(waiting, key=lambda rank: rank == case.victim):  # the victim is the last
        limit = victims_limit if index == case.victim else HANG / 2
        if index == case.victim:
            time.sleep(0.1 * max(1.0, pool.scale))  # the others have come
            struck = lateness.Strike.now(ranks)
            struck.at += int(victims_limit * 1e9)
        ranks[index].say(
            f"configure generation{pool.generations} {index} {case.world} {int(limit * 1000)}"
        )
    releases = lateness.Releases(struck)
    for index in waiting:
        event = ranks[index].expect("configured", HANG)
        expect_kind(event, STRIKES["timeout"].kinds)
        if index != case.victim:
            expect_cause(event, case.victim, ranks)
        if missing_in(event) != {absent}:
            raise MatrixError(f"rank {index} does not name rank {absent} alone: {event['text']}")
        releases.add(ranks[index], event)
    return releases.expect_within((STRIKES["timeout"].bound + PROBING) * pool.scale)


def _cut(pool: Pool, case: Case, ranks: list[RankProcess]) -> float:
    """The network between two members breaks, until somebody was told of it.

    It hits a generation while it forms, or the barrier that is its first operation. Who has gone on
    to the next generation by then waits there for those who were told and stay away. What is
    bounded is the time from the last cut, so how far apart the releases are.
    """
    begin_configuring(pool, ranks)
    told: dict[int, Event] = {}
    struck = lateness.Strike.now(ranks)
    until = time.monotonic() + HANG
    while not told:
        if time.monotonic() > until:
            raise MatrixError("no generation failed, however often its connections were cut")
        struck = lateness.Strike.now(ranks)
        cut(case, ranks)
        time.sleep(CUT_EVERY)
        told = {i: event for i, rank in enumerate(ranks) if (event := rank.poll("failed", 0))}
    releases = lateness.Releases(struck)
    late: dict[int, Event] = {}
    limit = (STRIKES["cut_connection"].bound + FORMING_BOUND) * pool.scale
    for index, rank in enumerate(ranks):
        event = told.get(index) or rank.expect("failed", HANG)
        expect_kind(event, FORMING["cut_connection"])
        if event["kind"] == "timeout":
            limit = pool.late_limit
            late[index] = event
        else:
            expect_ends(event, case, ranks)
            expect_how(event, STRIKES["cut_connection"].how)
        releases.add(rank, event)
    if len(late) == len(ranks):
        raise MatrixError("nobody was told of the cut connection: all ran out of time")
    expect_missing_named(late, set(range(case.world)) - late.keys())
    return releases.expect_within(limit)


def _expect_store_named(events: list[Event], store: str, kinds: frozenset[str]) -> None:
    """Somebody says which store it was, in an error of its kind: one that is killed is known as
    lost."""
    named = [event for event in events if f"the store at {store}" in event["text"]]
    if not any(event["kind"] in kinds for event in named):
        told = [f"{event['kind']}: {event['text']}" for event in events]
        raise MatrixError(f"nobody names the store in an error of {sorted(kinds)}: {told}")


def run_store_forming_case(pool: Pool, world: int, number: int) -> float:
    """The store dies or freezes while generations form one after the other; the seconds to the last
    release.

    Raises:
        MatrixError: somebody was told late, or of something else, or nobody of the store.
    """
    ranks = pool.take(world)
    begin_configuring(pool, ranks)
    time.sleep(pool.rng.uniform(0.005, 0.03))
    struck = lateness.Strike.now(ranks)
    pool.store.strike(number)
    releases = lateness.Releases(struck)
    events = []
    for rank in ranks:
        event = rank.expect("failed", HANG)
        expect_kind(event, STORE_FORMING[number])
        events.append(event)
        releases.add(rank, event)
    _expect_store_named(events, pool.store.address, STORE_KINDS[number])
    released = releases.expect_within(pool.late_limit + STORE_SILENCE * max(1.0, pool.scale))
    pool.new_store()
    return released
