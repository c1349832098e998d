"""One run of the suite in a process of its own, with its progress on stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace

from conformance.suite import WAYS

# The suite ends each test by its limit; this one is for a suite that does not.
SECONDS_A_RUN = 1800


@dataclass(frozen=True)
class Result:
    """What became of one test.

    Attributes:
        outcome: "passed", "failed" or "skipped".
        detail: the reason, or the first rank's traceback.
        repeated: whether it failed first, and this is the second try.
    """

    test: str
    outcome: str
    seconds: float
    detail: str
    repeated: bool = False


def run(way: str, tests: list[str], known: set[str]) -> list[Result]:
    """Run these tests (all where there are none) in that way; what fails is tried once more.

    The suite's ranks meet within limits that a busy machine misses now and then. Of those that are
    known to fail nothing else is expected.
    """
    results = {result.test: result for result in run_once(way, tests)}
    failed = [name for name, result in results.items() if result.outcome == "failed"]
    failed = [name for name in failed if name not in known]
    if failed:
        again = run_once(way, failed, "once more ")
        results.update((result.test, replace(result, repeated=True)) for result in again)
    return list(results.values())


def run_once(way: str, tests: list[str], word: str = "") -> list[Result]:
    """Run these tests in that way."""
    began = time.monotonic()
    command = [sys.executable, "-m", "conformance.suite", way, *tests]
    results: list[Result] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        end = threading.Timer(SECONDS_A_RUN, os.killpg, (process.pid, signal.SIGKILL))
        end.start()
        try:
            total = json.loads(process.stdout.readline() or '{"tests": 0}')["tests"]
            for line in process.stdout:
                results.append(Result(**json.loads(line)))
                progress(f"{way} {word}{len(results)}/{total} {results[-1].test}")
            process.wait()
        finally:
            end.cancel()
            if process.returncode is None:  # interrupted: its ranks go with it
                os.killpg(process.pid, signal.SIGKILL)
    progress("")
    if process.returncode != 0 or len(results) != total:
        ended = f"ended after {len(results)} of {total} tests (status {process.returncode})"
        sys.exit(f"{way}: the run {ended}")
    seconds = time.monotonic() - began
    counts = {o: sum(r.outcome == o for r in results) for o in ("passed", "failed", "skipped")}
    words = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    print(f"{way:10} {word}{words} in {seconds:.0f} s: {WAYS[way]}", file=sys.stderr, flush=True)
    return results


def progress(text: str) -> None:
    """One line that overwrites itself on a terminal; elsewhere one line in twenty tests."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)
    elif text and int(text.split("/")[0].split()[-1]) % 20 == 0:
        print(text, file=sys.stderr, flush=True)
