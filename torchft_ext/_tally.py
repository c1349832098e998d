"""What this process has done in elastic jobs, in numbers: for metrics().

Written by the thread that runs the training loop, read by any.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

__all__ = ["Tally", "tally"]


@dataclass
class Tally:
    """Counts since the process began, but for `view` to `step`, which are the newest.

    Attributes:
        views: that this process has formed.
        joined, lost: members that came with a view, and that a view was without.
        view, members, rank: number and size of the newest view, and this process's rank in it.
        seconds_of: by phase of a change of views (View.phases), all together.
        last_seconds_of: of the newest view.
        agreements, agreement_seconds: that were awaited, and how long.
        committed, repeated: tries at steps.
        step: the program's count of steps.
        syncs, sync_bytes: of the state.
    """

    views: int = 0
    joined: int = 0
    lost: int = 0
    view: int = 0
    members: int = 0
    rank: int = 0
    seconds_of: dict[str, float] = field(default_factory=dict)
    last_seconds_of: dict[str, float] = field(default_factory=dict)
    agreements: int = 0
    agreement_seconds: float = 0.0
    committed: int = 0
    repeated: int = 0
    step: int = 0
    syncs: int = 0
    sync_bytes: int = 0

    def note_view(self, number: int, rank: int, size: int, old_size: int, continuing: int) -> None:
        """A view has been formed."""
        self.views += 1
        self.joined += size - continuing
        self.lost += max(old_size - continuing, 0)
        self.view, self.members, self.rank = number, size, rank
        self.last_seconds_of = {}

    def note_phases(self, phases: dict[str, timedelta]) -> None:
        """Parts of the newest view's begin have ended."""
        for phase, took in phases.items():
            seconds = took.total_seconds()
            self.seconds_of = {**self.seconds_of, phase: self.seconds_of.get(phase, 0.0) + seconds}
            self.last_seconds_of = {**self.last_seconds_of, phase: seconds}

    def note_agreement(self, seconds: float) -> None:
        """An agreement was awaited."""
        self.agreements += 1
        self.agreement_seconds += seconds

    def note_try(self, committed: bool, step: int) -> None:
        """A try at a step has ended; `step`: committed by now."""
        self.committed += committed
        self.repeated += not committed
        self.step = step

    def note_sync(self, nbytes: int, took: timedelta) -> None:
        """The state has been synced."""
        self.syncs += 1
        self.sync_bytes += nbytes
        self.note_phases({"sync": took})


tally = Tally()
