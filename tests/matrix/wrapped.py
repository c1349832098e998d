"""Groups over an engine that is not this package's own, or in a child process: the same strikes.

The ranks are Python processes, since these groups are torchft_ext.process_group's. Each rank keeps
its groups, and a spare child, from case to case.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from matrix import lateness
from matrix.cases import (
    HANG,
    LARGE,
    SMALL,
    Pool,
    await_late_writes,
    expect_cause,
    expect_exact_sums,
    expect_how,
    expect_kind,
    expect_left_out,
    go_on_and_thaw,
)
from matrix.process import RankProcess
from matrix.strikes import DEATH, STRIKES, Strike

PROGRAM = (sys.executable, str(Path(__file__).with_name("tensor_rank.py")))
WORLD = 4
VICTIMS = (0, WORLD - 1)
KINDS = ("Gloo", "BabyHost", "BabyGloo", "BabyNCCL")
OF_A_CHILD = {
    "child_killed": Strike(
        "child_killed",
        frozenset({"aborted"}),
        r"its child process \d+ was ended by SIGKILL",
        DEATH,
        command="die_child kill",
        survives=True,
    ),
}
# No death: what is pending may still complete. One member after the other learns by its backend's
# connections that a member is gone, and then waits 30 ms for word of a death.
LEAVING = 0.3  # seconds
# NCCL tells nobody that a member is gone: whoever waits for that one gives up after a second.
GIVING_UP = 1.0  # seconds
# The kernel needs 21 to 139 ms to take down a process that has loaded torch (measured from the kill
# to waitid(), idle and busy). Only then can its parent hear of it.
TAKING_DOWN = 0.14  # seconds
STRIKES_HERE = {
    "sigkill": STRIKES["sigkill"],
    "sigstop": STRIKES["sigstop"],
    "abort": replace(STRIKES["abort"], how=r"abort\(\) was called"),
    "shutdown": replace(STRIKES["shutdown"], how="it left", bound=LEAVING),
    **OF_A_CHILD,
}
OF_A_KIND = {
    ("BabyNCCL", "shutdown"): replace(STRIKES_HERE["shutdown"], bound=GIVING_UP + LEAVING),
    **{
        (kind, "child_killed"): replace(STRIKES_HERE["child_killed"], bound=DEATH + TAKING_DOWN)
        for kind in ("BabyGloo", "BabyNCCL")
    },
}


@dataclass(frozen=True)
class WrappedCase:
    """A strike against a member of such a group."""

    kind: str
    operation: str
    victim: int
    strike: str
    thaw: str = "first"  # of THAWS; matters where the strike is a freeze

    def __str__(self) -> str:
        """As printed in reports, and accepted on the command line."""
        return f"{self.operation}/{WORLD}/{self.victim}/{self.kind}:{self.strike}"


def strikes_of(kind: str) -> list[str]:
    """What can happen to a member of a group of that kind."""
    return [name for name in STRIKES_HERE if kind != "Gloo" or name not in OF_A_CHILD]


def _strike_of(case: WrappedCase) -> Strike:
    return OF_A_KIND.get((case.kind, case.strike), STRIKES_HERE[case.strike])


def run_wrapped_case(pool: Pool, case: WrappedCase) -> float:
    """Run it; the seconds from the strike to the last survivor's release.

    Raises:
        MatrixError: something went otherwise than the table says; ranks may be in any state.
    """
    strike = _strike_of(case)
    ranks = pool.take(WORLD, PROGRAM)
    for rank in ranks:
        rank.say(f"be {case.kind}")
    pool.configure(ranks)
    elements = pool.rng.choice((SMALL, LARGE))
    for rank in ranks:
        rank.say(f"loop {case.operation} {elements}")
    time.sleep(pool.rng.uniform(0.02, 0.05))  # so that it strikes anywhere in a round

    victim = ranks[case.victim]
    struck = lateness.Strike.now(ranks)
    if strike.signal is not None:
        victim.signal(strike.signal)
    else:
        victim.say(strike.command or "")
    gone = strike.signal is not None or not strike.survives
    survivors = [rank for rank in ranks if not (gone and rank is victim)]
    releases = lateness.Releases(struck)
    for rank in survivors:
        event = rank.expect("failed", HANG)
        expect_kind(event, strike.kinds)
        expect_cause(event, case.victim, ranks)
        expect_how(event, strike.how)
        releases.add(rank, event)
    released = releases.expect_within(pool.bound(strike, WORLD))
    _go_on(pool, case, ranks, survivors)
    return released


def _go_on(
    pool: Pool, case: WrappedCase, ranks: list[RankProcess], survivors: list[RankProcess]
) -> None:
    strike, victim = _strike_of(case), ranks[case.victim]

    def thaw() -> None:
        victim.signal(signal.SIGCONT)
        expect_left_out(victim.expect("failed", HANG), case.victim, ranks)
        await_late_writes(case.operation)

    if strike.signal == signal.SIGSTOP:
        go_on_and_thaw(pool, survivors, thaw, case.thaw)
    else:
        expect_exact_sums(pool, survivors)
    if strike.survives:
        expect_exact_sums(pool, ranks)
    else:
        victim.end()
