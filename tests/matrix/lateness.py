"""Was it late because of the library, or because the machine had no core for it?

Bounds of time are promises about the library. A rank whose threads stood in the kernel's run queue
meanwhile, ready and without a core, shows nothing about it. The kernel counts that time for each
thread; so a case that did nothing wrong but to be late is repeated, once, if the late rank's threads
had waited for a core at least as long as it was late. Otherwise, and the second time, it has failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from matrix.process import Event, MatrixError, RankProcess, monotonic_ns


class LateError(MatrixError):
    """A bound was missed, and nothing else was wrong.

    Attributes:
        starved: the late rank's threads had waited for a core as long as it was late.
    """

    def __init__(self, text: str, *, starved: bool) -> None:
        """Text: what the bound is, and by how much it was missed."""
        super().__init__(text)
        self.starved = starved


def waited_for_a_core(pid: int) -> float:
    """Seconds, of all its threads since they began; 0 where the kernel does not count them."""
    total = 0
    for statistics in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(statistics.read_text().split()[1])  # nanoseconds in a run queue
        except (OSError, IndexError, ValueError):  # the thread has ended; no such statistics
            continue
    return total / 1e9


@dataclass
class Strike:
    """The moment of one. Attributes: at: by the ranks' clock; waited: by pid, until then."""

    at: int
    waited: dict[int, float]

    @classmethod
    def now(cls, ranks: Iterable[RankProcess]) -> Strike:
        """At this moment, to these ranks or to some of them."""
        waited = {rank.pid: waited_for_a_core(rank.pid) for rank in ranks}
        return cls(monotonic_ns(), waited)


class Releases:
    """When each survivor was released, counted from the strike."""

    def __init__(self, strike: Strike) -> None:
        """Of the operations that this strike ended."""
        self._strike = strike
        self.last = 0.0
        self._last_rank: RankProcess | None = None

    def add(self, rank: RankProcess, event: Event) -> None:
        """It said so, in this event."""
        seconds = (event["t_ns"] - self._strike.at) / 1e9
        if self._last_rank is None or seconds > self.last:
            self.last, self._last_rank = seconds, rank

    def expect_within(self, limit: float, told: str = "") -> float:
        """The seconds until the last of them; told: what it was told, for the message.

        Raises:
            LateError: they are more than the limit.
        """
        if self._last_rank is None or self.last <= limit:
            return self.last
        pid = self._last_rank.pid
        waited = waited_for_a_core(pid) - self._strike.waited.get(pid, 0.0)
        text = (
            f"the last survivor was released after {self.last:.3f} s, allowed {limit:.3f} s; "
            f"its threads had waited {waited:.3f} s for a core{told and ': '}{told}"
        )
        raise LateError(text, starved=waited >= self.last - limit)
