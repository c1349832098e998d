#!/usr/bin/env python3
"""Say what got slower between two results of the same benchmark.

    python benchmarks/compare.py OLD NEW     two files that --json wrote, or two directories of them

A time is slower where its median and its minimum have both grown by more than --by (a tenth): the
median alone follows what else the machine did, the minimum alone a single lucky run. Times of
fewer than --samples runs are not judged. Exit status 1: something got slower. Both files should be
of one machine at rest; where they are not, it says so, and compares all the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUMMARY = {"count", "median", "p99", "min", "max"}  # bench_report.summary()


@dataclass(frozen=True)
class Change:
    """One time in both results."""

    name: str
    old: dict[str, float]
    new: dict[str, float]

    @property
    def growth(self) -> float:
        """Return by how much of it the median has grown; 0.1: a tenth."""
        return self.new["median"] / self.old["median"] - 1

    def is_slower(self, by: float) -> bool:
        """Tell whether the median and the minimum have grown by more than this."""
        return all(self.new[each] > self.old[each] * (1 + by) for each in ("median", "min"))


def label(row: dict[str, Any]) -> str:
    """Name a row by what was asked for: its texts and whole numbers."""
    given = {key: each for key, each in row.items() if isinstance(each, (str, int))}
    return " ".join(f"{key}={each}" for key, each in given.items())


def summaries(value: object, name: str = "") -> Iterator[tuple[str, dict[str, float]]]:
    """Find the times in a part of the results, each with the names on the way to it."""
    if isinstance(value, list):
        for row in value:
            yield from summaries(row, name)
    elif isinstance(value, dict):
        if value.keys() >= SUMMARY:
            yield name, value
            return
        here = f"{name} {label(value)}".strip()
        for key, each in value.items():
            yield from summaries(each, f"{here} {key}".strip())


def changes(old: dict[str, Any], new: dict[str, Any], samples: int) -> list[Change]:
    """Return the times that are in both, and that are of enough runs."""
    before = dict(summaries(old["results"]))
    found = [
        Change(name, before[name], after)
        for name, after in summaries(new["results"])
        if name in before
    ]
    return [
        each
        for each in found
        if min(each.old["count"], each.new["count"]) >= samples and each.old["min"] > 0
    ]


def pairs_of(old: Path, new: Path) -> list[tuple[Path, Path]]:
    """Return the files to be compared."""
    if not old.is_dir():
        return [(old, new)]
    return [
        (each, new / each.name) for each in sorted(old.glob("*.json")) if (new / each.name).exists()
    ]


def compare(old_path: Path, new_path: Path, by: float, samples: int) -> tuple[int, int]:
    """Print what got slower in one benchmark. Returns how many times did, and of how many."""
    old, new = json.loads(old_path.read_text()), json.loads(new_path.read_text())
    if old["benchmark"] != new["benchmark"]:
        raise SystemExit(f"{new_path} is of '{new['benchmark']}', not of '{old['benchmark']}'")
    if old.get("machine") != new.get("machine"):
        print(f"{old['benchmark']}: two machines: {old.get('machine')} and {new.get('machine')}")
    both = changes(old, new, samples)
    slower = [each for each in both if each.is_slower(by)]
    for each in sorted(slower, key=lambda change: -change.growth):
        print(
            f"{old['benchmark']}: slower by {each.growth:.0%}: {each.name}: "
            f"{each.old['median']:.3g} s to {each.new['median']:.3g} s"
        )
    print(f"{old['benchmark']}: {len(slower)} of {len(both)} times got slower")
    return len(slower), len(both)


def main(words: list[str] | None = None) -> int:
    """Compare what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--by", type=float, default=0.1, help="growth that counts (0.1: a tenth)")
    parser.add_argument("--samples", type=int, default=10, help="runs that a time needs")
    arguments = parser.parse_args(words)
    pairs = pairs_of(arguments.old, arguments.new)
    if not pairs:
        raise SystemExit(f"{arguments.old} and {arguments.new} have no file in common")
    counts = [compare(*pair, arguments.by, arguments.samples) for pair in pairs]
    if not any(both for _, both in counts):
        raise SystemExit(f"{arguments.old} and {arguments.new} have no times in common")
    return 1 if any(slower for slower, _ in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
