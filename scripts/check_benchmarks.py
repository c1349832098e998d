#!/usr/bin/env python3
"""Runs the benchmarks as briefly as they can be, and looks at the JSON that they write.

Shows that they work; no figure is judged, and none of these is worth keeping.

    python scripts/check_benchmarks.py [NAME...]   default: all but gpu.py; some 40 s
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
LIMIT_S = 150
# Each in a world of two, with what must be found in its results: (key, values).
BRIEF: dict[str, tuple[list[str], str, set[object]]] = {
    "allreduce": (["--worlds=2", "--sizes=4,256K"], "bytes", {4, 262144}),
    "configure": (["--worlds=2"], "engine", {"ft", "gloo"}),
    "recovery": (
        ["--world=2", "--kills=1", "--resident=0", "--scenarios=running,elastic,frozen,gloo"],
        "scenario",
        {"running", "elastic", "frozen", "gloo"},
    ),
    "agree": (["--world=2"], "world", {2}),
    "idle": ([], "world", {2}),
    "import_cost": (["--processes=1"], "", set()),
}
SUMMARY = {"count", "median", "p99", "min", "max"}
AT_REST = {"idle"}  # their figures may be zero: threads that sleep


def numbers_in(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers_in(inner)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def summaries_in(value: object) -> Iterator[dict[str, float]]:
    """Statistics of times, wherever they stand (bench_report.summary())."""
    if isinstance(value, dict):
        if value.keys() >= SUMMARY:
            yield value
        for inner in value.values():
            yield from summaries_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from summaries_in(inner)


def troubles_with(name: str, written: dict[str, Any]) -> list[str]:
    """What is wrong with the JSON of one benchmark, each in words."""
    missing = {"benchmark", "when", "machine", "versions", "arguments", "results"} - written.keys()
    if missing:
        return [f"{name}: no {', '.join(sorted(missing))}"]
    found = []
    if written["benchmark"] != name:
        found.append(f"{name}: calls itself {written['benchmark']!r}")
    if any(isinstance(each, str) and "/" in each for each in written["arguments"].values()):
        found.append(f"{name}: names a path of this machine")
    if not written["results"]:
        found.append(f"{name}: no results")
    if not all(math.isfinite(n) and n >= 0 for n in numbers_in(written["results"])):
        found.append(f"{name}: a figure is negative or no number")
    for one in summaries_in(written["results"]):
        ordered = 0 <= one["min"] <= one["median"] <= one["p99"] <= one["max"]
        if one["count"] < 1 or not ordered or (one["min"] == 0 and name not in AT_REST):
            found.append(f"{name}: impossible statistics {one}")
    return found


def run(name: str, folder: Path) -> list[str]:
    options, key, wanted = BRIEF[name]
    target = folder / f"{name}.json"
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", f"--json={target}"]
    done = subprocess.run([*command, *options], timeout=LIMIT_S)
    if done.returncode != 0:
        return [f"{name}: ended with {done.returncode}"]
    written = json.loads(target.read_text())
    found = troubles_with(name, written)
    if not found and key and {result[key] for result in written["results"]} != wanted:
        found.append(f"{name}: results for other values of {key!r} than {wanted}")
    return found


def main() -> int:
    troubles = []
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or BRIEF:
            begun = time.monotonic()
            print(f"== {name}", flush=True)
            troubles += run(name, Path(folder))
            print(f"   {time.monotonic() - begun:.0f} s", flush=True)
    print("\n".join(troubles) or "the benchmarks run and write what they measured")
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
