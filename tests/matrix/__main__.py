"""The failure matrix: every operation x world size x victim x strike, on ranks without Python.

Run as ``python -m matrix --rank EXECUTABLE`` with tests/ on the path. Exit status 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time

from matrix.cases import Case, Pool, run_case, run_store_case
from matrix.process import MatrixError
from matrix.strikes import OPERATIONS, STORE_STRIKES, STRIKES, WORLDS, applies, victims


def all_cases() -> list[Case]:
    """The whole matrix."""
    return [
        Case(operation, world, victim, strike)
        for operation in OPERATIONS
        for world in WORLDS
        for victim in victims(world)
        for strike in STRIKES
        if applies(operation, strike)
    ]


def sample(cases: list[Case], rng: random.Random) -> list[Case]:
    """All cases in an order whose beginning holds every value of every axis."""
    shuffled = rng.sample(cases, len(cases))
    first: list[Case] = []
    seen: set[object] = set()
    for case in shuffled:
        values = {case.operation, case.world, (case.world, case.victim), case.strike}
        if not values <= seen:
            seen |= values
            first.append(case)
    rest = [case for case in shuffled if case not in set(first)]
    return first + rest


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="matrix", description=__doc__)
    parser.add_argument("--rank", required=True, help="the built torchft_ext_rank")
    parser.add_argument(
        "--sample", action="store_true", help="a random part that holds every value of every axis"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="of a sample (default 8)")
    parser.add_argument(
        "--cases", type=int, default=0, help="of a sample: at most so many (0: no limit)"
    )
    parser.add_argument("--seed", type=int, default=None, help="of a sample; printed")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor on all time bounds (sanitizers: 10)"
    )
    parser.add_argument(
        "--only", default="", help="cases whose name OPERATION/WORLD/VICTIM/STRIKE contains this"
    )
    parser.add_argument("--json", default="", help="write the result to this file")
    return parser.parse_args()


class Report:
    """What went how, for people on stderr and for machines in a file."""

    def __init__(self, total: int) -> None:
        """Count up to total."""
        self._total = total
        self.releases: dict[str, list[float]] = {}
        self.failed: list[str] = []
        self.passed = 0

    def add(self, case: str, strike: str, seconds: float, error: str | None) -> None:
        """Count one case and print progress now and then."""
        if error is None:
            self.passed += 1
            self.releases.setdefault(strike, []).append(seconds)
        else:
            self.failed.append(f"{case}: {error}")
            print(f"FAILED {case}: {error}", file=sys.stderr, flush=True)
        done = self.passed + len(self.failed)
        if done % 50 == 0 or done == self._total:
            print(
                f"matrix: {done} of {self._total}, {len(self.failed)} failed",
                file=sys.stderr,
                flush=True,
            )

    def table(self) -> str:
        """Strike by strike: cases, median and worst release."""
        lines = [f"{'strike':<14}{'cases':>6}{'median ms':>11}{'worst ms':>10}"]
        for strike, times in sorted(self.releases.items()):
            ordered = sorted(times)
            middle = ordered[len(ordered) // 2] * 1000
            lines.append(f"{strike:<14}{len(times):>6}{middle:>11.1f}{ordered[-1] * 1000:>10.1f}")
        return "\n".join(lines)


def attempt(pool: Pool, report: Report, name: str, strike: str, body: object) -> None:
    """One case; after a failure the next one begins with fresh ranks."""
    assert callable(body)
    try:
        seconds = body()
        report.add(name, strike, seconds or 0.0, None)
    except MatrixError as error:
        report.add(name, strike, 0.0, str(error))
        pool.new_store()


def main() -> int:
    """Run what the command line says."""
    options = arguments()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**31)
    rng = random.Random(seed)
    cases = [case for case in all_cases() if options.only in str(case)]
    if options.sample:
        cases = sample(cases, rng)
        cases = cases[: options.cases] if options.cases else cases
        print(f"matrix: a sample with --seed {seed}", file=sys.stderr)
    report = Report(len(cases))
    pool = Pool(os.path.abspath(options.rank), options.scale, rng)
    until = time.monotonic() + options.minutes * 60
    for case in cases:
        if options.sample and time.monotonic() > until:
            break
        attempt(pool, report, str(case), case.strike, lambda case=case: run_case(pool, case))
    if not options.only:
        for name, number in STORE_STRIKES.items():
            for operation in ("allreduce",) if options.sample else OPERATIONS[:-1]:
                body = lambda o=operation, n=number: run_store_case(pool, o, 3, n)  # noqa: E731
                attempt(pool, report, f"{operation}/3/-/{name}", name, body)
    pool.drop()
    pool.store.end()
    print(report.table())
    print(f"{report.passed} passed, {len(report.failed)} failed")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "seed": seed,
                    "passed": report.passed,
                    "failed": report.failed,
                    "releases": report.releases,
                },
                file,
            )
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
