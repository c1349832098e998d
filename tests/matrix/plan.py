"""Every case of the matrix under one form, and which of them a run takes, in which order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from matrix import forming, groups, kernel, pairs, wrapped
from matrix.cases import Case, Pool, run_case, run_store_case
from matrix.strikes import OPERATIONS, STORE_STRIKES, STRIKES, THAWS, WORLDS, victims

STORE_WORLDS = (2, 3, 4)


@dataclass(frozen=True)
class Entry:
    """One case.

    Attributes:
        name: as noted by --done, whatever the seed.
        strike: under which the table of the report counts it, with what chance has settled of it.
        world: how many ranks it takes.
        axes: the values that it stands for; a sample holds each at least once.
        run: runs it; seconds from strike to release. Raises MatrixError or SkippedError.
    """

    name: str
    strike: str
    world: int
    axes: frozenset[tuple[object, ...]]
    run: Callable[[Pool], float]

    @property
    def title(self) -> str:
        """The name, with what chance has settled."""
        return "".join((self.name, *self.strike.partition(",")[1:]))


def _entry(
    family: str,
    name: str,
    strike: str,
    world: int,
    axes: Iterable[tuple[object, ...]],
    run: Callable[[Pool], float],
) -> Entry:
    values = {(family, *value) for value in axes} | {(family, "strike", strike)}
    return Entry(name, strike, world, frozenset(values), run)


def _thaw(seed: int, case: object) -> str:
    """Whether a frozen process wakes first or later, in this case and under this seed."""
    return random.Random(f"{seed} {case}").choice(THAWS)


def _with_thaw(strike: str, thaw: str, *, frozen: bool) -> str:
    return f"{strike}, thaw {thaw}" if frozen else strike


def _single(seed: int) -> list[Entry]:
    cases = [
        Case(operation, world, victim, strike)
        for operation in OPERATIONS
        for world in WORLDS
        for victim in victims(world)
        for strike in STRIKES
        if (operation, strike) != ("configure", "cut_liveness")
    ]
    return [_single_entry(replace(case, thaw=_thaw(seed, case))) for case in cases]


def _single_entry(case: Case) -> Entry:
    strike = _with_thaw(case.strike, case.thaw, frozen=case.strike == "sigstop")
    return _entry(
        "single",
        str(case),
        strike,
        case.world,
        [
            ("operation", case.operation),
            ("victim", case.world, case.victim),
            # While a generation forms more may be told: that proves less about the strike.
            ("strike", strike, "forming" if case.operation == "configure" else "formed"),
        ],
        partial(_runner(case.operation, case.strike), case=case),
    )


def _runner(operation: str, strike: str) -> Callable[..., float]:
    needs_help = operation == "configure" and strike in forming.STRIKES_HERE
    return forming.run_forming_case if needs_help else run_case


def _pairs(seed: int) -> list[Entry]:
    cases = [
        pairs.PairCase(operation, world, two, combination)
        for operation in OPERATIONS
        if operation != "configure"
        for world, all_pairs in pairs.VICTIMS.items()
        for two in all_pairs
        for combination in pairs.COMBINATIONS
    ]
    return [
        _entry(
            "pairs",
            str(case),
            _with_thaw(case.combination, case.thaw, frozen=any(map(case.stopped, case.victims))),
            case.world,
            [("operation", case.operation), ("victims", case.world, case.victims)],
            partial(pairs.run_pair_case, case=case),
        )
        for case in [replace(case, thaw=_thaw(seed, case)) for case in cases]
    ]


def _groups(seed: int) -> list[Entry]:
    cases = [
        groups.GroupsCase(operation, world, place, strike)
        for operation in groups.OPERATIONS
        for world in groups.WORLDS
        for place in groups.PLACES
        for strike in groups.STRIKES_HERE
    ]
    return [
        _entry(
            "groups",
            str(case),
            _with_thaw(f"groups: {case.strike}", case.thaw, frozen=case.strike == "sigstop"),
            case.world,
            [("operation", case.operation), ("place", case.world, case.place)],
            partial(groups.run_groups_case, case=case),
        )
        for case in [replace(case, thaw=_thaw(seed, case)) for case in cases]
    ]


def _wrapped(seed: int) -> list[Entry]:
    cases = [
        wrapped.WrappedCase(kind, operation, victim, strike)
        for kind in wrapped.KINDS
        for operation in OPERATIONS
        if operation != "configure"
        for victim in wrapped.VICTIMS
        for strike in wrapped.strikes_of(kind)
    ]
    return [
        _entry(
            "wrapped",
            str(case),
            _with_thaw(f"{case.kind}: {case.strike}", case.thaw, frozen=case.strike == "sigstop"),
            wrapped.WORLD,
            [("operation", case.operation), ("victim", case.victim)],
            partial(wrapped.run_wrapped_case, case=case),
        )
        for case in [replace(case, thaw=_thaw(seed, case)) for case in cases]
    ]


def _kernel() -> list[Entry]:
    cases = [
        kernel.KernelCase(operation, world, strike)
        for operation in OPERATIONS
        if operation != "configure"
        for world in kernel.WORLDS
        for strike in kernel.STRIKES_HERE
    ]
    return [
        _entry(
            "kernel",
            str(case),
            case.strike,
            case.world,
            # Each strike has every operation: some machines cannot play one of the two.
            [("operation", case.operation, case.strike), ("world", case.world)],
            partial(kernel.run_kernel_case, case=case),
        )
        for case in cases
    ]


def _run_store(pool: Pool, operation: str, world: int, number: int) -> float:
    if operation == "configure":
        return forming.run_store_forming_case(pool, world, number)
    run_store_case(pool, operation, world, number)
    return 0.0


def _store() -> list[Entry]:
    return [
        _entry(
            "store",
            f"{operation}/{world}/-/{strike}",
            strike,
            world,
            [("operation", operation), ("world", world)],
            partial(_run_store, operation=operation, world=world, number=number),
        )
        for strike, number in STORE_STRIKES.items()
        for operation in OPERATIONS
        for world in STORE_WORLDS
    ]


def everything(seed: int) -> list[Entry]:
    """The whole matrix; seed: of what chance settles about a case."""
    return [*_single(seed), *_pairs(seed), *_groups(seed), *_wrapped(seed), *_kernel(), *_store()]


def axes_of(entries: Iterable[Entry]) -> frozenset[tuple[object, ...]]:
    """All values that occur in them."""
    return frozenset().union(*(entry.axes for entry in entries))


def cover(entries: list[Entry], rng: random.Random) -> list[Entry]:
    """A random part of them, small, in which every value of every axis occurs."""
    left = rng.sample(entries, len(entries))
    missing = set(axes_of(entries))
    chosen: list[Entry] = []
    while missing:
        best = max(left, key=lambda entry: len(entry.axes & missing))
        chosen.append(best)
        left.remove(best)
        missing -= best.axes
    # The store's cases last: each ends all ranks, with which the others go on.
    return sorted(chosen, key=lambda entry: entry.strike in STORE_STRIKES)


def shard(entries: list[Entry], which: str) -> list[Entry]:
    """The i-th of n parts, given as "i/n"; the parts are of a kind.

    Raises:
        ValueError: that is no "i/n" with 1 <= i <= n.
    """
    index, _, count = which.partition("/")
    if not 1 <= int(index) <= int(count):
        raise ValueError(f"expected a shard like 2/4, found {which!r}")
    return entries[int(index) - 1 :: int(count)]
