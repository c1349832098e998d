"""Two victims of one generation: at once, or the second while the survivors of the first begin
anew."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass

from matrix.cases import (
    HANG,
    Pool,
    await_late_writes,
    elements_for,
    expect_cause,
    expect_exact_sums,
    expect_how,
    expect_kind,
    expect_left_out,
    go_on_and_thaw,
)
from matrix.lateness import Releases, Strike
from matrix.process import Event, MatrixError, RankProcess
from matrix.strikes import CONFIGURE_LIMIT, DEATH, ENDED, LOST, STOPPED

# Neighbours on the ring of backup connections, and ranks with others between them on both sides.
VICTIMS: dict[int, tuple[tuple[int, int], ...]] = {
    4: ((0, 1), (3, 0), (0, 2), (1, 3)),
    5: ((0, 1), (2, 3), (4, 1)),
    8: ((0, 1), (3, 4), (7, 0), (0, 4), (2, 6)),
}
# What a configure() may say whose member dies, by how far it has come.
FORMING = frozenset({"peer lost", "connection lost", "timeout", "aborted"})
COMBINATIONS = ("kill_and_kill", "kill_and_stop", "stop_and_kill", "kill_then_kill")


@dataclass(frozen=True)
class PairCase:
    """A cell of the matrix with two victims, struck in this order."""

    operation: str
    world: int
    victims: tuple[int, int]
    combination: str
    thaw: str = "first"  # of THAWS; matters where one is stopped

    def __str__(self) -> str:
        """As printed in reports, and accepted on the command line."""
        first, second = self.victims
        return f"{self.operation}/{self.world}/{first}+{second}/{self.combination}"

    def stopped(self, victim: int) -> bool:
        """Whether that one is, not killed."""
        blows = re.split("_and_|_then_", self.combination)
        return blows[self.victims.index(victim)] == "stop"


def run_pair_case(pool: Pool, case: PairCase) -> float:
    """Run it; the seconds from the first strike to the last survivor's release.

    Raises:
        MatrixError: something went otherwise than it must; ranks may be in any state.
    """
    ranks = pool.take(case.world)
    pool.configure(ranks)
    elements = elements_for(case.world, pool.rng)
    for rank in ranks:
        rank.say(f"loop {case.operation} {elements}")
    time.sleep(pool.rng.uniform(0.005, 0.03))  # so that it strikes anywhere in a round

    first, second = (ranks[victim] for victim in case.victims)
    survivors = [rank for rank in ranks if rank not in (first, second)]
    struck = Strike.now(ranks)
    if case.combination == "kill_then_kill":
        first.signal(signal.SIGKILL)
        released = _collect(pool, case, ranks, [*survivors, second], struck)
        _kill_while_forming(pool, second, [rank for rank in ranks if rank is not first])
    else:
        for victim in case.victims:
            ranks[victim].signal(signal.SIGSTOP if case.stopped(victim) else signal.SIGKILL)
        released = _collect(pool, case, ranks, survivors, struck)
    _go_on(pool, case, ranks, survivors)
    return released


def _collect(
    pool: Pool,
    case: PairCase,
    ranks: list[RankProcess],
    survivors: list[RankProcess],
    struck: Strike,
) -> float:
    releases = Releases(struck)
    for rank in survivors:
        event = rank.expect("failed", HANG)
        expect_kind(event, LOST)
        if event["cause"] not in case.victims:
            raise MatrixError(f"expected the loss of one of {case.victims}: {event}")
        expect_cause(event, event["cause"], ranks)
        expect_how(event, STOPPED if case.stopped(event["cause"]) else ENDED)
        releases.add(rank, event)
    # A death is among the strikes, and one failure releases everybody.
    return releases.expect_within(DEATH * pool.scale)


def _kill_while_forming(pool: Pool, second: RankProcess, members: list[RankProcess]) -> None:
    """The generation without the first victim does not form, or fails as soon as it has."""
    pool.generations += 1
    limit = CONFIGURE_LIMIT * max(1.0, pool.scale / 10)
    place = members.index(second)
    for index, rank in enumerate(members):
        rank.say(
            f"configure generation{pool.generations} {index} {len(members)} {int(limit * 1000)}"
        )
        rank.say("loop allreduce 1000")
    time.sleep(pool.rng.uniform(0.0, 0.006))  # anywhere from the first store call to the first sum
    second.signal(signal.SIGKILL)
    for rank in members:
        if rank is second:
            continue
        configured = rank.expect("configured", limit + HANG)
        failed = rank.expect("failed", HANG)
        if configured["ok"]:
            expect_kind(failed, LOST)
            expect_cause(failed, place, members)
            expect_how(failed, ENDED)
            continue
        _judge_forming(configured, place, members)
        if any(failed.get(key) != configured[key] for key in ("ok", "kind", "cause")):
            raise MatrixError(f"it was told {configured} first, and then {failed}")


def _judge_forming(event: Event, dead: int, members: list[RankProcess]) -> None:
    expect_kind(event, FORMING)
    if event["kind"] == "timeout":
        return  # its cause may be a member who waited for the dead one, and gave up first
    if event["cause"] >= 0 and dead not in (event["cause"], event["other"]):
        raise MatrixError(f"a generation that forms blames another than rank {dead}: {event}")
    if event["cause"] >= 0:
        expect_cause(event, event["cause"], members)


def _go_on(
    pool: Pool, case: PairCase, ranks: list[RankProcess], survivors: list[RankProcess]
) -> None:
    stopped = [victim for victim in case.victims if case.stopped(victim)]
    dead = [victim for victim in case.victims if not case.stopped(victim)]
    for victim in dead:
        ranks[victim].end()

    def thaw() -> None:
        ranks[stopped[0]].signal(signal.SIGCONT)
        event = ranks[stopped[0]].expect("failed", HANG)
        _judge_thawed(event, stopped[0], dead[0], ranks)
        await_late_writes(case.operation)

    if stopped:
        go_on_and_thaw(pool, survivors, thaw, case.thaw)
    else:
        expect_exact_sums(pool, survivors)
    expect_exact_sums(pool, [rank for rank in ranks if rank.alive()])


def _judge_thawed(event: Event, thawed: int, dead: int, ranks: list[RankProcess]) -> None:
    """Whichever of the two ended the generation: the other one's death, or that it was frozen
    itself."""
    expect_kind(event, LOST)
    if event["cause"] == dead:
        expect_cause(event, dead, ranks)
        expect_how(event, ENDED)
    else:
        expect_left_out(event, thawed, ranks)
