"""One case of the matrix: form a generation, strike, look at what every survivor was told, go on
without the victim."""

from __future__ import annotations

import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from matrix import cores, lateness
from matrix.process import Event, MatrixError, RankProcess, StoreProcess
from matrix.strikes import (
    CONFIGURE_LIMIT,
    FORMING,
    FORMING_HOW,
    HEARTBEAT,
    LOST,
    OVERTAKEN,
    PROBING,
    STORE_KINDS,
    STRIKES,
    UNTOLD,
    Strike,
)

HANG = 60.0  # seconds; reached only when something hangs
SMALL = 257
LARGE = 300_000  # several pieces
LEFT_BEHIND = 5.0  # seconds without an answer, of some ranks alone
MOST_TRIES = 4  # of one rank for one generation: a death is told once
LATE_WRITES = 1.0  # seconds after a thaw; what it still sends has come by then, on busy cores too
MOST_UNCROWDED = 4  # ranks
SANITIZED = 10.0  # the scale of ranks under a sanitizer
ASIDE = "aside"  # a group of the survivors
UNWRITTEN = ("barrier", "configure")  # operations that write to no buffer


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
    thaw: str = "first"  # of THAWS; matters where the strike is a freeze

    def __str__(self) -> str:
        """As printed in reports, and accepted on the command line."""
        return f"{self.operation}/{self.world}/{self.victim}/{self.strike}"

    def ends(self) -> tuple[int, int]:
        """The two ranks of the connection or liveness connection that is cut; first the higher one,
        which had made it."""
        return (1, 0) if self.victim == 0 else (self.victim, 0)


@dataclass
class Pool:
    """Ranks that are kept alive from case to case, and the store."""

    program: tuple[str, ...]  # by which a rank is started, unless a case has one of its own
    scale: float  # bounds are multiplied by it
    rng: random.Random
    store: StoreProcess = field(default_factory=StoreProcess)
    ranks: dict[tuple[object, ...], list[RankProcess]] = field(default_factory=dict)
    taken: list[RankProcess] = field(default_factory=list)
    generations: int = 0

    def take(self, count: int, program: tuple[str, ...] | None = None) -> list[RankProcess]:
        """Living ranks of that program, started where there are too few."""
        heartbeat, program = self.heartbeat(count), program or self.program
        ranks = self.ranks.get((program, heartbeat), [])
        for rank in [r for r in ranks if not r.alive()]:
            rank.end()
        ranks = self.ranks[program, heartbeat] = [r for r in ranks if r.alive()]
        missing = range(len(ranks), count)
        started = [RankProcess(program, self.store.address, heartbeat) for _ in missing]
        ranks += started
        self.taken = ranks[:count]
        for rank in started:
            rank.await_ready()
        for rank in self.taken:
            rank.drain()
        return list(self.taken)

    def heartbeat(self, world: int) -> float:
        """Seconds; the limit of the ranks of such a world: stretched where they crowd a core, or
        crawl."""
        small = world <= MOST_UNCROWDED and self.scale < SANITIZED
        return HEARTBEAT if small else HEARTBEAT * max(1.0, self.scale)

    def bound(self, strike: Strike, world: int) -> float:
        """Seconds from that strike to the last release."""
        silence = self.heartbeat(world) if strike.silent else 0.0
        return silence + strike.bound * self.scale

    @property
    def configure_limit(self) -> float:
        """Seconds; of every configure() that may fail: long enough to notice a freeze."""
        return max(CONFIGURE_LIMIT, 2 * HEARTBEAT * self.scale)

    @property
    def late_limit(self) -> float:
        """Seconds; by then a configure() of that limit has ended."""
        return self.configure_limit + 0.5 * max(1.0, self.scale / 10)

    def configure(self, ranks: list[RankProcess], group: str = "") -> None:
        """Make them one generation of that group, in this order.

        A process that an earlier case left to be ended has died since, maybe while some of these
        were in a generation with it and had no part in what followed. Who did not know it is told
        by the first configure(), once, and tries again as the documentation says: at once, under
        the same prefix. So do those who were told of that.
        """
        self.generations += 1
        prefix = f"generation{self.generations}{group}"
        commands = [
            f"configure {prefix} {index} {len(ranks)} {int(HANG * 1000)}"
            for index in range(len(ranks))
        ]
        for rank, command in zip(ranks, commands, strict=True):
            rank.say(command, group)
        waiting, tries = set(range(len(ranks))), Counter[int]()
        failed: dict[int, str] = {}
        until, heard = time.monotonic() + 2 * HANG, time.monotonic()
        while waiting and time.monotonic() < until:
            for index in sorted(waiting):
                event = ranks[index].poll("configured", 0.002, group)
                if event is None:
                    continue
                heard = time.monotonic()
                tries[index] += 1
                if _not_coming(event) and tries[index] < MOST_TRIES:
                    ranks[index].say(commands[index], group)
                    continue
                waiting.remove(index)
                if not event["ok"]:
                    failed[index] = event["text"]
            if max(tries.values(), default=0) > 1 and time.monotonic() - heard > LEFT_BEHIND:
                # It was told when the others had formed: their generation has failed without it.
                heard = time.monotonic()
                for index in set(range(len(ranks))) - waiting - failed.keys():
                    ranks[index].say(commands[index], group)
                    waiting.add(index)
        if waiting or failed:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise MatrixError(
                f"a generation of {len(ranks)} could not form: {told}; no answer: {sorted(waiting)}"
            )

    def transports(self) -> str:
        """How each rank is reached, in the order in which a case takes them."""
        return "ranks reached by " + ", ".join(rank.transport for rank in self.taken)

    def drop(self) -> None:
        """End every rank."""
        for rank in [rank for ranks in self.ranks.values() for rank in ranks]:
            rank.end()
        self.ranks, self.taken = {}, []

    def new_store(self) -> None:
        """Begin with another store, and so with other ranks."""
        self.drop()
        self.store.end()
        self.store = StoreProcess()


def _not_coming(event: Event) -> bool:
    """It failed with a death that came before any record of that process."""
    return not event["ok"] and "before it came to the new generation" in event["text"]


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
    aborting = forming and case.strike == "abort"
    counts = _counts_of_generations(ranks) if aborting else []
    if forming:
        begin_configuring(pool, ranks)
    else:
        for rank in ranks:
            rank.say(f"loop {case.operation} {elements}")
    time.sleep(pool.rng.uniform(0.005, 0.03))

    struck = _strike(case, strike, ranks)
    gone = not strike.survives or strike.signal is not None
    survivors = [r for i, r in enumerate(ranks) if i != case.victim] if gone else list(ranks)
    released, told = _collect(pool, case, ranks, survivors, struck)
    if aborting:
        _expect_told_with_rank_0(told, counts)
    if gone:
        _go_on_without(pool, case, ranks, survivors)
    else:
        expect_exact_sums(pool, ranks)
    return released


def begin_configuring(pool: Pool, ranks: list[RankProcess]) -> None:
    """They form one generation after the other, until one fails."""
    pool.generations += 1
    for index, rank in enumerate(ranks):
        limit = int(pool.configure_limit * 1000)
        rank.say(f"configure generation{pool.generations} {index} {len(ranks)} {limit}")
        rank.say("loop configure 0")
    for rank in ranks:
        rank.expect("configured", HANG)


def _generation_of(event: Event) -> int:
    found = re.search(r"rank \d+/\d+, generation (\d+)\)", event["text"])
    if found is None:
        raise MatrixError(f"it does not say of which generation it speaks: {event}")
    return int(found[1])


def _counts_of_generations(ranks: list[RankProcess]) -> list[int]:
    """By which number each knows their present generation, which ends: processes count their own
    ones."""
    for rank in ranks:
        rank.say("loop barrier 0")
    ranks[0].say("abort")
    return [_generation_of(rank.expect("failed", HANG)) for rank in ranks]


def _expect_told_with_rank_0(told: dict[int, Event], counts: list[int]) -> None:
    """Nobody waited for the deadline in an attempt that rank 0 has come to: it passes each end on.

    Who has gone on to one that rank 0 stays away from, alive, can know of no end there.
    """
    attempts = {rank: _generation_of(event) - counts[rank] for rank, event in told.items()}
    for rank, event in told.items():
        if event["kind"] == "timeout" and attempts[rank] <= attempts[0]:
            raise MatrixError(
                f"rank {rank} was not told of the abort, though rank 0 was there: "
                f"attempts {attempts}: {event['text']}"
            )


def _strike(case: Case, strike: Strike, ranks: list[RankProcess]) -> lateness.Strike:
    victim = ranks[case.victim]
    now = lateness.Strike.now(ranks)
    if strike.signal is not None:
        victim.signal(strike.signal)
    elif strike.command is not None:
        victim.say(strike.command)
    elif case.strike == "cut_liveness":
        upper, lower = case.ends()
        ranks[upper].say("cut_liveness " + ranks[lower].incarnation)
    else:
        cut(case, ranks)
    return now


def cut(case: Case, ranks: list[RankProcess]) -> None:
    """The higher rank of a pair connects: it cuts its connections to the lower one's addresses."""
    upper, lower = case.ends()
    ranks[upper].say("cut " + " ".join(ranks[lower].addresses))


def _collect(
    pool: Pool,
    case: Case,
    ranks: list[RankProcess],
    survivors: list[RankProcess],
    struck: lateness.Strike,
) -> tuple[float, dict[int, Event]]:
    """The seconds to the last release, and what each was told."""
    strike = STRIKES[case.strike]
    events: dict[int, Event] = {}
    told, waited = lateness.Releases(struck), lateness.Releases(struck)
    forming = case.operation == "configure"
    limit = pool.bound(strike, case.world) + (PROBING * pool.scale if forming else 0.0)
    kinds = FORMING.get(case.strike, strike.kinds) if forming else strike.kinds
    late: dict[int, Event] = {}  # of those who waited for somebody until the deadline
    for rank in survivors:
        event = events[ranks.index(rank)] = rank.expect("failed", HANG)
        expect_kind(event, kinds)
        if forming and event["kind"] == "timeout":
            late[ranks.index(rank)] = event
            waited.add(rank, event)
        else:
            _judge(case, event, ranks)
            told.add(rank, event)
    if late and len(late) == len(survivors) and case.strike not in UNTOLD:
        raise MatrixError(f"nobody was told of the {case.strike}: all ran out of time")
    expect_missing_named(late, set(range(case.world)) - late.keys())
    released = max(told.expect_within(limit), waited.expect_within(pool.late_limit))
    return released, events


def _judge(case: Case, event: Event, ranks: list[RankProcess]) -> None:
    strike = STRIKES[case.strike]
    if strike.victim_named:
        expect_cause(event, case.victim, ranks)
    else:
        expect_ends(event, case, ranks)
    forming = case.operation == "configure"
    expect_how(event, FORMING_HOW.get(case.strike, strike.how) if forming else strike.how)


def expect_kind(event: Event, kinds: frozenset[str]) -> None:
    """The rank was told of something, and of one of these kinds."""
    if event["ok"]:
        raise MatrixError(f"a survivor was told of nothing: {event}")
    if event["kind"] not in kinds:
        raise MatrixError(
            f"kind {event['kind']!r}, expected one of {sorted(kinds)}: {event['text']}"
        )


def expect_cause(event: Event, rank: int, ranks: list[RankProcess]) -> None:
    """It blames that one of these: its rank and its process."""
    if event["cause"] != rank:
        raise MatrixError(f"the cause is rank {event['cause']}, expected {rank}: {event['text']}")
    if event["pid"] != ranks[rank].pid:
        raise MatrixError(
            f"the cause is pid {event['pid']}, rank {rank} has {ranks[rank].pid}: {event['text']}"
        )


def expect_how(event: Event, how: str) -> None:
    """It says how that was known, as this pattern has it."""
    if not re.search(how, event["text"]):
        raise MatrixError(f"it does not say {how!r}: {event['text']}")


def expect_ends(event: Event, case: Case, ranks: list[RankProcess]) -> None:
    """It names both ends of the cut connection, one of them by its process too."""
    ends = set(case.ends())
    if {event["cause"], event["other"]} != ends:
        raise MatrixError(
            f"the ends are {event['cause']} and {event['other']}, expected {ends}: {event['text']}"
        )
    expect_cause(event, event["cause"], ranks)


def expect_missing_named(late: dict[int, Event], away: set[int]) -> None:
    """Each of the late names some of those who stayed away, and nobody else."""
    for rank, event in late.items():
        named = missing_in(event)
        if not named or not named <= away:
            raise MatrixError(
                f"rank {rank} names {sorted(named)}, {sorted(away)} were away: {event['text']}"
            )


def missing_in(event: Event) -> set[int]:
    """Who did not come, or made no connection, as this error has it."""
    lists = re.findall(r"ranks? ([\d, ]+) did not come", event["text"])
    missing = {int(rank) for rank in re.findall(r"\d+", ",".join(lists))}
    if "its connections did not come up in time" in event["text"]:
        missing.add(event["cause"])
    return missing


def _go_on_without(
    pool: Pool, case: Case, ranks: list[RankProcess], survivors: list[RankProcess]
) -> None:
    victim = ranks[case.victim]
    strike = STRIKES[case.strike]

    def thaw() -> None:
        victim.signal(signal.SIGCONT)
        _judge_thawed(victim.expect("failed", HANG), case, ranks)
        await_late_writes(case.operation)

    if strike.signal == signal.SIGSTOP:
        go_on_and_thaw(pool, survivors, thaw, case.thaw)
    else:
        expect_exact_sums(pool, survivors)
    if strike.survives:
        expect_exact_sums(pool, ranks)
        return
    if case.strike == "core_dump":
        cores.expect_one(victim)
    victim.end()


def go_on_and_thaw(
    pool: Pool, survivors: list[RankProcess], thaw: Callable[[], None], order: str
) -> None:
    """The survivors form a generation of their own with exact sums; the frozen one wakes before or
    after.

    thaw: wakes it, looks at what it is told, and waits for what it still sends. Where that comes
    later, the sums before it are another group's, so that the buffers of the struck operation are
    still there to be looked at after it; and the generation must stand as if nobody had woken.
    """
    if order == "first":
        thaw()
        expect_exact_sums(pool, survivors)
        return
    pool.configure(survivors)
    pool.configure(survivors, ASIDE)
    expect_sums(survivors, ASIDE)
    survivors[0].say("abort", ASIDE)
    thaw()
    expect_unchanged(survivors)
    expect_sums(survivors)


def _judge_thawed(event: Event, case: Case, ranks: list[RankProcess]) -> None:
    if case.operation != "configure" or case.thaw == "first" or event.get("kind") in LOST:
        expect_left_out(event, case.victim, ranks)
        return
    expect_kind(event, OVERTAKEN)
    if event["kind"] == "timeout":
        expect_how(event, "did not come|its connections did not come up|no answer from the store")
    else:
        expect_cause(event, event["cause"], ranks)
        if case.victim not in (event["cause"], event["other"]):
            raise MatrixError(f"the thawed rank blames a connection that is not its own: {event}")


def expect_left_out(event: Event, rank: int, ranks: list[RankProcess]) -> None:
    """The thawed rank was told that others found it frozen and went on, with itself as the
    cause."""
    expect_kind(event, LOST)
    expect_cause(event, rank, ranks)
    if not any(words in event["text"] for words in ("left out", "has not answered")):
        raise MatrixError(f"the thawed rank was not told that it was frozen: {event['text']}")


def await_late_writes(operation: str) -> None:
    """What a thawed process sends for its old operation would have been written by now."""
    if operation not in UNWRITTEN:
        time.sleep(LATE_WRITES)


def expect_unchanged(ranks: list[RankProcess], group: str = "") -> None:
    """No buffer of that group was written to after its operation had been released."""
    for rank in ranks:
        rank.say("check", group)
    for rank in ranks:
        if not rank.expect("checked", HANG, group)["unchanged"]:
            raise MatrixError(f"rank (pid {rank.pid}): a buffer changed after its release")


def expect_exact_sums(pool: Pool, ranks: list[RankProcess]) -> None:
    """They form the next generation, it works, and nothing was written for the last one meanwhile.

    The buffers of the last operation are looked at as late as can be: the next one takes their
        place.
    """
    pool.configure(ranks)
    expect_unchanged(ranks)
    expect_sums(ranks)


def expect_sums(ranks: list[RankProcess], group: str = "") -> None:
    """The generation that they are in works."""
    for rank in ranks:
        rank.say("once allreduce 1000", group)
    for rank in ranks:
        event = rank.expect("done", HANG, group)
        if not event["ok"]:
            raise MatrixError(f"the next generation does not work: {event['text']}")


def run_store_case(pool: Pool, operation: str, world: int, number: int) -> None:
    """The store dies or freezes: running operations go on, configure() says so, a new store mends
    it."""
    ranks = pool.take(world)
    pool.configure(ranks)
    for rank in ranks:
        rank.say(f"loop {operation} 1000")
    pool.store.strike(number)
    _expect_progress(ranks)
    ranks[0].say("abort")
    for rank in ranks:
        expect_kind(rank.expect("failed", HANG), STRIKES["abort"].kinds)
    _expect_store_missed(pool, ranks, number)
    pool.new_store()


def progress(ranks: list[RankProcess]) -> list[tuple[int, float]]:
    """Rounds of their loops and the longest one's seconds; a loop that has failed says that
    instead."""
    for rank in ranks:
        rank.say("progress")
    answers = [rank.expect("progress", HANG) for rank in ranks]
    return [(answer["rounds"], answer["longest_us"] / 1e6) for answer in answers]


def _expect_progress(ranks: list[RankProcess]) -> None:
    """Each of their loops makes several rounds more."""
    before, until = progress(ranks), time.monotonic() + HANG
    while any(now < then + 5 for (now, _), (then, _) in zip(progress(ranks), before, strict=True)):
        if time.monotonic() > until:
            raise MatrixError("operations stand still since the store was lost")
        time.sleep(0.01)


def _expect_store_missed(pool: Pool, ranks: list[RankProcess], number: int) -> None:
    """configure() names the store; a frozen one is known by the limit alone, which is kept."""
    frozen = number == signal.SIGSTOP
    limit = pool.configure_limit if frozen else 5 * max(1.0, pool.scale)
    began = lateness.Strike.now(ranks)
    for index, rank in enumerate(ranks):
        rank.say(f"configure lost {index} {len(ranks)} {int(limit * 1000)}")
    releases = lateness.Releases(began)
    for rank in ranks:
        event = rank.expect("configured", HANG)
        expect_kind(event, STORE_KINDS[number])
        if f"the store at {pool.store.address}" not in event["text"]:
            raise MatrixError(f"configure() does not name the store: {event['text']}")
        releases.add(rank, event)
    releases.expect_within(pool.late_limit if frozen else limit)
