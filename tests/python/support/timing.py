"""Limits of time that a slow library breaks in every round, and a machine that stalls in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

ROUNDS = 3
AT_ONCE = 0.5  # seconds; what takes milliseconds on a machine that does not stall


def assert_within(limit: float, measure: Callable[[], Sequence[float]]) -> None:
    """In one of some rounds all the times, in seconds, that `measure()` returns are below it.

    What else `measure()` asserts holds in every round.
    """
    rounds: list[Sequence[float]] = []
    while not rounds or max(rounds[-1]) >= limit:
        assert len(rounds) < ROUNDS, f"not within {limit} s in any round: {rounds}"
        rounds.append(measure())
