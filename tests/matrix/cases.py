"""One case of the matrix: form an epoch, strike, look at what every survivor was told, go on without the victim."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

from matrix import lateness
from matrix.process import Event, MatrixError, RankProcess, StoreProcess
from matrix.strikes import CONFIGURE_LIMIT, FORMING, HEARTBEAT, PROBING, STRIKES, Strike

HANG = 60.0  # seconds; reached only when something hangs
SMALL = 257
LARGE = 300_000  # several pieces
MOST_TRIES = 4  # of one rank for one epoch: a death is told once


def elements_for(world: int, rng: random.Random) -> int:
    """Of one operation: few, or many.

    Eight ranks with the larger number would have two cores move and add so much that every one of
    their threads waits for a core, and what is measured would be that. A quarter is several pieces
    still.
    """
    return rng.choice((SMALL, LARGE if world <= 5 else LARGE // 4))


@dataclass(frozen=True)
class Case:
    """A cell of the matrix."""

    operation: str
    world: int
    victim: int
    strike: str

    def __str__(self) -> str:
        """As printed in reports, and accepted on the command line."""
        return f"{self.operation}/{self.world}/{self.victim}/{self.strike}"

    def ends(self) -> tuple[int, int]:
        """The two ranks of the link that a cut_link cuts, the higher one first: it connected."""
        return (1, 0) if self.victim == 0 else (self.victim, 0)


@dataclass
class Pool:
    """Ranks that are kept alive from case to case, and the store."""

    executable: str
    scale: float  # bounds are multiplied by it
    rng: random.Random
    store: StoreProcess = field(default_factory=StoreProcess)
    ranks: list[RankProcess] = field(default_factory=list)
    epochs: int = 0

    def take(self, count: int) -> list[RankProcess]:
        """Living ranks, started where there are too few."""
        for rank in [r for r in self.ranks if not r.alive()]:
            rank.end()
        self.ranks = [r for r in self.ranks if r.alive()]
        while len(self.ranks) < count:
            heartbeat = HEARTBEAT * max(1.0, self.scale)  # bounds of freezes contain it
            self.ranks.append(RankProcess(self.executable, self.store.address, heartbeat))
        taken = self.ranks[:count]
        for rank in taken:
            rank.drain()
        return taken

    @property
    def configure_limit(self) -> float:
        """Seconds; of every configure() that may fail: long enough to notice a freeze."""
        return max(CONFIGURE_LIMIT, 2 * HEARTBEAT * self.scale)

    def configure(self, ranks: list[RankProcess], group: str = "") -> None:
        """Make them one epoch of that group, in this order.

        A process that an earlier case left to be ended has died since, maybe while some of these
        were in an epoch with it and had no part in what followed. Who did not know it is told by
        the first configure(), once, and tries again as the documentation says: at once, under the
        same prefix. So do those who were told of that.
        """
        self.epochs += 1
        prefix = f"epoch{self.epochs}{group}"
        commands = [
            f"configure {prefix} {index} {len(ranks)} {int(HANG * 1000)}"
            for index in range(len(ranks))
        ]
        for rank, command in zip(ranks, commands, strict=True):
            rank.say(command, group)
        waiting, tries = set(range(len(ranks))), Counter[int]()
        failed: dict[int, str] = {}
        until = time.monotonic() + 2 * HANG
        while waiting and time.monotonic() < until:
            for index in sorted(waiting):
                event = ranks[index].poll("configured", 0.002, group)
                if event is None:
                    continue
                tries[index] += 1
                if _not_coming(event) and tries[index] < MOST_TRIES:
                    ranks[index].say(commands[index], group)
                    continue
                waiting.remove(index)
                if not event["ok"]:
                    failed[index] = event["text"]
        if waiting or failed:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise MatrixError(
                f"an epoch of {len(ranks)} could not form: {told}; no answer: {sorted(waiting)}"
            )

    def drop(self) -> None:
        """End every rank."""
        for rank in self.ranks:
            rank.end()
        self.ranks = []

    def new_store(self) -> None:
        """Begin with another store, and so with other ranks."""
        self.drop()
        self.store.end()
        self.store = StoreProcess()


def _not_coming(event: Event) -> bool:
    """It failed with a death that came before any record of that process."""
    return not event["ok"] and "before it came to the new epoch" in event["text"]


def run_case(pool: Pool, case: Case) -> float:
    """Run it; the seconds from the strike to the last survivor's release.

    Raises:
        MatrixError: something went otherwise than the table says; ranks may be in any state.
    """
    strike = STRIKES[case.strike]
    ranks = pool.take(case.world)
    forming = case.operation == "configure"
    pool.configure(ranks)
    elements = elements_for(case.world, pool.rng)
    if forming:
        begin_configuring(pool, case, ranks)
    else:
        for rank in ranks:
            rank.say(f"loop {case.operation} {elements}")
    time.sleep(pool.rng.uniform(0.005, 0.03))

    struck = _strike(case, strike, ranks)
    gone = not strike.survives or strike.signal is not None
    survivors = [r for i, r in enumerate(ranks) if i != case.victim] if gone else list(ranks)
    released = _collect(pool, case, strike, survivors, struck, forming)
    if gone:
        _go_on_without(pool, case, strike, ranks, survivors)
    else:
        expect_exact_sums(pool, ranks)
    return released


def begin_configuring(pool: Pool, case: Case, ranks: list[RankProcess]) -> None:
    """They form one epoch after the other, until one fails."""
    pool.epochs += 1
    for index, rank in enumerate(ranks):
        limit = int(pool.configure_limit * 1000)
        rank.say(f"configure epoch{pool.epochs} {index} {case.world} {limit}")
        rank.say("loop configure 0")
    for rank in ranks:
        rank.expect("configured", HANG)


def _strike(case: Case, strike: Strike, ranks: list[RankProcess]) -> lateness.Strike:
    victim = ranks[case.victim]
    now = lateness.Strike.now(ranks)
    if strike.signal is not None:
        victim.signal(strike.signal)
    elif strike.command is not None:
        victim.say(strike.command)
    else:
        cut(case, ranks)
    return now


def cut(case: Case, ranks: list[RankProcess]) -> None:
    """The higher rank of a pair connects: it cuts its connections to the lower one's port."""
    upper, lower = case.ends()
    ranks[upper].say(f"cut {ranks[lower].port}")


def _collect(
    pool: Pool,
    case: Case,
    strike: Strike,
    survivors: list[RankProcess],
    struck: lateness.Strike,
    forming: bool,
) -> float:
    releases = lateness.Releases(struck)
    limit = (strike.bound + PROBING if forming else strike.bound) * pool.scale
    if forming and case.strike in FORMING:
        limit = pool.configure_limit + 0.5 * max(1.0, pool.scale / 10)
    kinds = set()
    for rank in survivors:
        event = rank.expect("failed", HANG)
        _judge(case, strike, event, forming)
        kinds.add(event["kind"])
        releases.add(rank, event)
    if case.strike == "abort" and kinds == {"timeout"}:
        raise MatrixError("nobody was told of the abort: all ran out of time")
    return releases.expect_within(limit)


def _judge(case: Case, strike: Strike, event: Event, forming: bool) -> None:
    wider = forming and case.strike in FORMING
    expect_kind(event, FORMING[case.strike] if wider else strike.kinds)
    if event["kind"] == "timeout" and wider:
        return  # the deadline names who did not come, in words
    if strike.victim_named:
        expect_cause(event, case.victim)
    else:
        expect_ends(event, set(case.ends()))


def expect_kind(event: Event, kinds: frozenset[str]) -> None:
    """The rank was told of something, and of one of these kinds."""
    if event["ok"]:
        raise MatrixError(f"a survivor was told of nothing: {event}")
    if event["kind"] not in kinds:
        raise MatrixError(
            f"kind {event['kind']!r}, expected one of {sorted(kinds)}: {event['text']}"
        )


def expect_cause(event: Event, rank: int) -> None:
    """It blames that one."""
    if event["cause"] != rank:
        raise MatrixError(f"the cause is rank {event['cause']}, expected {rank}: {event['text']}")


def expect_ends(event: Event, ends: set[int]) -> None:
    """It names both ends of the cut link."""
    if {event["cause"], event["other"]} != ends:
        raise MatrixError(
            f"the ends are {event['cause']} and {event['other']}, expected {ends}: {event['text']}"
        )


def _go_on_without(
    pool: Pool, case: Case, strike: Strike, ranks: list[RankProcess], survivors: list[RankProcess]
) -> None:
    victim = ranks[case.victim]
    if strike.signal == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
        told = victim.expect("failed", HANG)
        if told["ok"]:
            raise MatrixError(f"the thawed rank was told of nothing: {told}")
        time.sleep(1.0)  # a late write would have come by now
    expect_unchanged(survivors)
    expect_exact_sums(pool, survivors)
    if strike.survives:
        expect_exact_sums(pool, ranks)
    else:
        victim.end()


def expect_unchanged(ranks: list[RankProcess]) -> None:
    """No buffer was written to after its operation had been released."""
    for rank in ranks:
        rank.say("check")
    for rank in ranks:
        if not rank.expect("checked", HANG)["unchanged"]:
            raise MatrixError("a buffer changed after its operation had been released")


def expect_exact_sums(pool: Pool, ranks: list[RankProcess]) -> None:
    """They form the next epoch, and it works."""
    pool.configure(ranks)
    for rank in ranks:
        rank.say("once allreduce 1000")
    for rank in ranks:
        event = rank.expect("done", HANG)
        if not event["ok"]:
            raise MatrixError(f"the next epoch does not work: {event['text']}")


def run_store_case(pool: Pool, operation: str, world: int, number: int) -> None:
    """The store dies or freezes: operations succeed, configure() says so, a new store mends it."""
    ranks = pool.take(world)
    pool.configure(ranks)
    pool.store.strike(number)
    for rank in ranks:
        rank.say(f"once {operation} 1000")
    for rank in ranks:
        event = rank.expect("done", HANG)
        if not event["ok"]:
            raise MatrixError(f"a lost store ended an operation: {event['text']}")
    # A killed store is known within a second; a frozen one may be known by the limit alone.
    limit = 5000 if number == signal.SIGSTOP else int(5000 * max(1.0, pool.scale))
    for index, rank in enumerate(ranks):
        rank.say(f"configure lost {index} {world} {limit}")
    for rank in ranks:
        event = rank.expect("configured", HANG)
        allowed = {"store lost"} if number == signal.SIGKILL else {"store lost", "timeout"}
        if event["ok"] or event["kind"] not in allowed:
            raise MatrixError(
                f"configure() without a store: {event}, expected one of {sorted(allowed)}"
            )
    pool.new_store()
