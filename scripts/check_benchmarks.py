#!/usr/bin/env python3
"""Runs benchmarks/run.py as briefly as it can be, and looks at the JSON and pictures it writes.

Shows that they work; no figure is judged, and none of these is worth keeping.

    python scripts/check_benchmarks.py [NAME...]   default: all but gpu.py and sync.py; some 60 s
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUN = Path(__file__).resolve().parent.parent / "benchmarks" / "run.py"
LIMIT_S = 280
SIZED: set[object] = {"allreduce", "broadcast", "allgather", "reduce_scatter", "reduce"}
SIZED |= {"gather", "scatter", "alltoall", "sendrecv", "barrier"}
UNSIZED: set[object] = {"issue", "wait_done", "agree", "configure", "abort"}
UNSIZED |= {"death", "death_last", "startup"}
# What must be found in the results of a world of two: (key, values). No key: nothing is compared.
WANTED: dict[str, tuple[str, set[object]]] = {
    "allreduce": ("bytes", {4, 262144}),
    "configure": ("engine", {"ft", "gloo"}),
    "recovery": ("scenario", {"running", "elastic", "spare", "frozen", "gloo"}),
    "agree": ("world", {2}),
    "sync": ("newcomers", {0, 1}),
    "divergence": ("tensors", {8, 40, 200}),
    "import_cost": ("", set()),
    "idle": ("world", {2}),
    "backend_call": ("world", {1}),
    "ddp_step": ("world", {2}),
    "reduce": ("type", {"float32"}),
    "ft_bench": ("op", SIZED | UNSIZED),
    "rivals": ("op", {"allreduce", "alltoall", "barrier"}),
}
# Who must have been measured, in every row. MPI libraries are where they are installed.
SOURCES = {
    "allreduce": {"ft", "gloo"},
    "ddp_step": {"c++", "python", "free"},
    "backend_call": {"engine", "group"},
}
SOURCES["rivals"] = {"ft", "gloo", "limit"}
PICTURES = {"recovery": ("recovery.png", "recovery_phases.png"), "rivals": ("rivals.png",)}
PNG = b"\x89PNG\r\n\x1a\n"
SMALLEST_PICTURE = 5000  # bytes: an empty one has fewer
SUMMARY = {"count", "median", "p99", "min", "max"}
LEFT_OUT = {"sync"}  # by default: it takes longer than all that it shows here
RATES_ALONE = {"reduce"}  # Google Benchmark's, without statistics of times
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


def gaps_in(name: str, written: dict[str, Any]) -> list[str]:
    """What the results of a brief run lack, each in words."""
    key, wanted = WANTED[name]
    found = []
    if key and {result[key] for result in written["results"]} != wanted:
        found.append(f"{name}: results for other values of {key!r} than {wanted}")
    for source in SOURCES.get(name, ()):
        if not all(source in result["seconds"] for result in written["results"]):
            found.append(f"{name}: not everything was measured of {source}")
    return found


def trouble_with_picture(path: Path) -> list[str]:
    if not path.exists():
        return [f"{path.name} was not drawn"]
    drawn = path.read_bytes()
    good = drawn.startswith(PNG) and len(drawn) >= SMALLEST_PICTURE
    return [] if good else [f"{path.name} is no picture"]


def troubles_in(folder: Path, names: list[str]) -> list[str]:
    """What is wrong with what a run of these has written there."""
    troubles = []
    for name in names:
        target = folder / f"{name}.json"
        if not target.exists():
            troubles.append(f"{name}: has written nothing")
            continue
        written = json.loads(target.read_text())
        troubles += troubles_with(name, written) or gaps_in(name, written)
        for picture in PICTURES.get(name, ()):
            troubles += trouble_with_picture(folder / picture)
    return troubles


def main() -> int:
    names = sys.argv[1:] or [name for name in WANTED if name not in LEFT_OUT]
    with tempfile.TemporaryDirectory() as folder:
        where = [f"--json={folder}", f"--pictures={folder}"]
        command = [sys.executable, str(RUN), "--quick", *where, *names]
        status = subprocess.run(command, check=False, timeout=LIMIT_S).returncode
        troubles = troubles_in(Path(folder), names)
    if status != 0:
        troubles.append(f"benchmarks/run.py ended with {status}")
    print("\n".join(troubles) or "the benchmarks run and write what they measured")
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
