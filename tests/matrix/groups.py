"""Several groups in the same processes: what happens to one of them, and what must not.

The default group holds all ranks; "low" and "high" hold its first and last ones and overlap in the
middle. All are in operations at once.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from matrix import lateness
from matrix.cases import (
    HANG,
    Pool,
    await_late_writes,
    expect_cause,
    expect_exact_sums,
    expect_how,
    expect_kind,
    expect_left_out,
    expect_unchanged,
    go_on_and_thaw,
)
from matrix.process import MatrixError, RankProcess
from matrix.strikes import STRIKES, Strike

OPERATIONS = ("allreduce", "allgather", "sendrecv")
WORLDS = (4, 5, 8)
STRIKES_HERE = ("sigkill", "sigstop", "os_exit", "exec", "abort", "timeout", "shutdown")
OF_THE_GROUP = frozenset({"abort", "timeout", "shutdown"})  # strike one group, not its process
PLACES = ("low", "both", "high")
ROUNDS = 5  # more of them in an undisturbed group show that it goes on
# Up to 8 processes with three groups each: without pauses they would all wait for a core all the
# time, and what is measured would be that. The larger size still takes several pieces.
ELEMENTS = (257, 70_000)
PAUSE_US = 10_000  # of a group's members between two of its operations


@dataclass(frozen=True)
class GroupsCase:
    """A cell of the matrix with three groups; the victim is in the group(s) named by place."""

    operation: str
    world: int
    place: str
    strike: str
    thaw: str = "first"  # of THAWS; matters where the strike is a freeze

    def __str__(self) -> str:
        """As printed in reports, and accepted on the command line."""
        return f"{self.operation}/{self.world}/groups-{self.place}/{self.strike}"

    def groups(self) -> dict[str, list[int]]:
        """The members of each group, as ranks of the default group."""
        middle = self.world // 2
        return {
            "": list(range(self.world)),
            "low": list(range(middle + 1)),
            "high": list(range(middle, self.world)),
        }

    def victim(self) -> int:
        """Its rank in the default group."""
        return {"low": 0, "both": self.world // 2, "high": self.world - 1}[self.place]


def run_groups_case(pool: Pool, case: GroupsCase) -> float:
    """Run it; the seconds from the strike to the last release in a struck group.

    Raises:
        MatrixError: something went otherwise than it must; ranks may be in any state.
    """
    strike = STRIKES[case.strike]
    ranks = pool.take(case.world)
    groups = case.groups()
    _begin(pool, case, ranks, groups)
    time.sleep(pool.rng.uniform(0.005, 0.03))  # so that it strikes anywhere in a round

    struck_groups, struck = _strike(case, strike, ranks, groups)
    gone = strike.signal is not None or not strike.survives
    releases = lateness.Releases(struck)
    for name in struck_groups:
        _collect(case, name, [ranks[i] for i in groups[name]], gone, releases)
    released = releases.expect_within(pool.bound(strike, case.world))
    for name in groups.keys() - struck_groups:
        _expect_undisturbed([ranks[i] for i in groups[name]], name)
    _go_on(pool, case, strike, ranks, groups)
    return released


def _begin(
    pool: Pool, case: GroupsCase, ranks: list[RankProcess], groups: dict[str, list[int]]
) -> None:
    elements = pool.rng.choice(ELEMENTS)
    for name, members in groups.items():
        pool.configure([ranks[rank] for rank in members], name)
    for name, members in groups.items():
        for rank in members:
            ranks[rank].say(f"loop {case.operation} {elements} {PAUSE_US}", name)


def _strike(
    case: GroupsCase, strike: Strike, ranks: list[RankProcess], groups: dict[str, list[int]]
) -> tuple[set[str], lateness.Strike]:
    victim = ranks[case.victim()]
    containing = {name for name, members in groups.items() if case.victim() in members}
    now = lateness.Strike.now(ranks)
    if case.strike in OF_THE_GROUP:
        struck = "high" if case.place == "high" else "low"
        victim.say(strike.command or "", struck)
        return {struck}, now
    if strike.signal is not None:
        victim.signal(strike.signal)
    else:
        victim.say(strike.command or "")
    return containing, now


def _collect(
    case: GroupsCase,
    name: str,
    members: list[RankProcess],
    gone: bool,
    releases: lateness.Releases,
) -> None:
    cause = case.groups()[name].index(case.victim())
    for rank, member in enumerate(members):
        if gone and rank == cause:
            continue
        event = member.expect("failed", HANG, name)
        expect_kind(event, STRIKES[case.strike].kinds)
        expect_cause(event, cause, members)
        expect_how(event, STRIKES[case.strike].how)
        releases.add(member, event)


def _rounds(rank: RankProcess, name: str) -> int:
    rank.say("progress", name)
    rounds: int = rank.expect("progress", HANG, name)["rounds"]
    return rounds


def _expect_undisturbed(members: list[RankProcess], name: str) -> None:
    """They go on, every further round with exact results, until one of them ends it."""
    before = {rank: _rounds(rank, name) for rank in members}
    until = time.monotonic() + HANG
    while any(_rounds(rank, name) < before[rank] + ROUNDS for rank in members):
        if time.monotonic() > until:
            raise MatrixError(f"group {name!r} stands still; the strike was not its affair")
    members[0].say("abort", name)
    for rank in members:
        event = rank.expect("failed", HANG, name)
        if event["ok"] or event["kind"] != "aborted":
            raise MatrixError(f"group {name!r} was told of the strike: {event}")


def _go_on(
    pool: Pool,
    case: GroupsCase,
    strike: Strike,
    ranks: list[RankProcess],
    groups: dict[str, list[int]],
) -> None:
    victim = ranks[case.victim()]

    def thaw() -> None:
        victim.signal(signal.SIGCONT)
        for name, members in groups.items():
            if case.victim() in members:
                event = victim.expect("failed", HANG, name)
                expect_left_out(event, members.index(case.victim()), [ranks[i] for i in members])
        await_late_writes(case.operation)

    if strike.signal == signal.SIGSTOP:
        go_on_and_thaw(pool, [rank for rank in ranks if rank is not victim], thaw, case.thaw)
    if not strike.survives:  # a group that was shut down stays so
        victim.end()
    left = [rank for rank in ranks if strike.survives or rank is not victim]
    expect_exact_sums(pool, left)
    for name in groups.keys() - {""}:  # the default group's were looked at with the sums
        expect_unchanged([ranks[i] for i in groups[name] if ranks[i] in left], name)
