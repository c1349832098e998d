"""What went how, for people on stderr and for machines in a file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


class Report:
    """Counts cases and prints progress.

    Attributes:
        releases: by strike, seconds from the strike to the last release of each passed case.
        failed, skipped, repeated: one line each, with the reason. A repeated case is also counted
            as what came of it.
    """

    def __init__(self, total: int, done_file: Path | None) -> None:
        """Count up to total; done_file: gets a line for each case that passed."""
        self._total = total
        self._done_file = done_file
        self._began = time.monotonic()
        self._spoke = self._began
        self.releases: dict[str, list[float]] = {}
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self.repeated: list[str] = []
        self.passed = 0

    def add_passed(self, case: str, strike: str, seconds: float) -> None:
        """Count a success."""
        self.passed += 1
        self.releases.setdefault(strike, []).append(seconds)
        if self._done_file is not None:
            with self._done_file.open("a", encoding="utf-8") as file:
                file.write(case + "\n")
        self._progress()

    def add_failed(self, case: str, why: str) -> None:
        """Count a failure, and say so at once."""
        self.failed.append(f"{case}: {why}")
        print(f"FAILED {case}: {why}", file=sys.stderr, flush=True)
        self._progress()

    def add_repeated(self, case: str, why: str) -> None:
        """Count a case that is tried once more, and say so at once."""
        self.repeated.append(f"{case}: {why}")
        print(f"REPEATED {case}: {why}", file=sys.stderr, flush=True)

    def add_skipped(self, case: str, why: str) -> None:
        """Count a case that this machine cannot run."""
        self.skipped.append(f"{case}: {why}")
        self._progress()

    @property
    def done(self) -> int:
        """Cases that have been looked at."""
        return self.passed + len(self.failed) + len(self.skipped)

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._spoke < 20 and self.done < self._total:
            return
        self._spoke = now
        elapsed = now - self._began
        left = elapsed / self.done * (self._total - self.done)
        print(
            f"matrix: {self.done} of {self._total}, {len(self.failed)} failed, "
            f"{elapsed:.0f} s; the rest takes about {left:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    def text(self, seed: int) -> str:
        """Strike by strike: cases, median and worst release; then what was skipped, and the sums."""
        lines = [f"{'strike':<28}{'cases':>6}{'median ms':>11}{'worst ms':>10}"]
        for strike, times in sorted(self.releases.items()):
            ordered = sorted(times)
            middle = ordered[len(ordered) // 2] * 1000
            lines.append(f"{strike:<28}{len(times):>6}{middle:>11.1f}{ordered[-1] * 1000:>10.1f}")
        lines += [f"skipped: {reason}" for reason in self.skipped]
        lines += [f"repeated: {reason}" for reason in self.repeated]
        lines.append(
            f"{self.passed} passed, {len(self.failed)} failed, {len(self.skipped)} skipped, "
            f"{len(self.repeated)} repeated in {time.monotonic() - self._began:.0f} s, seed {seed}"
        )
        return "\n".join(lines)

    def write(self, path: Path, seed: int) -> None:
        """Everything, as JSON."""
        keys = ("passed", "failed", "skipped", "repeated", "releases")
        values = {"seed": seed, **{key: getattr(self, key) for key in keys}}
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
