"""Was it late because of the library, or because the machine had no core for it?

Bounds of time are promises about the library. A thread that stood in the kernel's run queue, ready
and without a core, shows nothing about it. The kernel counts that time for each thread; so a case
that did nothing wrong but to be late is repeated, once, if a single one of the late rank's threads
through which the news goes had waited for a core at least as long as the rank was late. Otherwise,
and the second time, it has failed. Not the sum of their waits: with more threads than cores that
would excuse almost everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from matrix.process import Event, MatrixError, RankProcess, monotonic_ns

# Through which the news of a strike reaches the caller that waits; "rank-worker" is that caller.
CARRIERS = frozenset(
    {
        "ft-monitor",
        "ft-backup",
        "ft-child",
        "ft-handoff",
        "ft-loop",
        "ft-store",
        "ft-watchdog",
        "rank-worker",
    }
)


class LateError(MatrixError):
    """A bound was missed, and nothing else was wrong.

    Attributes:
        starved: a thread of the late rank had waited for a core as long as it was late.
    """

    def __init__(self, text: str, *, starved: bool) -> None:
        """Text: what the bound is, and by how much it was missed."""
        super().__init__(text)
        self.starved = starved


def waits_for_a_core(pid: int) -> dict[int, float]:
    """Seconds, by thread, of those that carry news, since they began; 0 where the kernel does not
    count."""
    waits = {}
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        try:
            if (thread / "comm").read_text().strip() in CARRIERS:
                in_run_queue = (thread / "schedstat").read_text().split()[1]  # nanoseconds
                waits[int(thread.name)] = int(in_run_queue) / 1e9
        except (OSError, IndexError, ValueError):  # the thread has ended; no such statistics
            continue
    return waits


@dataclass
class Strike:
    """The moment of one. Attributes: at: by the ranks' clock; waits: by thread, until then."""

    at: int
    waits: dict[int, float]

    @classmethod
    def now(cls, ranks: Iterable[RankProcess]) -> Strike:
        """At this moment, to these ranks or to some of them."""
        waits: dict[int, float] = {}
        for rank in ranks:
            waits |= waits_for_a_core(rank.pid)
        return cls(monotonic_ns(), waits)

    def longest_wait(self, rank: RankProcess) -> float:
        """Seconds since then of that one of its threads which waited for a core the longest."""
        waits = waits_for_a_core(rank.pid).items()
        return max((wait - self.waits.get(thread, 0.0) for thread, wait in waits), default=0.0)


class Releases:
    """When each survivor was released, counted from the strike."""

    def __init__(self, strike: Strike) -> None:
        """Of the operations that this strike ended."""
        self._strike = strike
        self.last = 0.0
        self._waited = 0.0  # of the last one

    def add(self, rank: RankProcess, event: Event) -> None:
        """It said so, in this event, just now."""
        seconds = (event["t_ns"] - self._strike.at) / 1e9
        waited = self._strike.longest_wait(rank)
        if seconds > self.last:
            self.last, self._waited = seconds, waited

    def expect_within(self, limit: float, told: str = "") -> float:
        """The seconds until the last of them; told: what it was told, for the message.

        Raises:
            LateError: they are more than the limit.
        """
        if self.last <= limit:
            return self.last
        text = (
            f"the last survivor was released after {self.last:.3f} s, allowed {limit:.3f} s; "
            f"one of its threads had waited {self._waited:.3f} s for a core{told and ': '}{told}"
        )
        raise LateError(text, starved=self._waited >= self.last - limit)
