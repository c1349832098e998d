"""The figures of gpu.py: its tables, and what is aimed at."""

from __future__ import annotations

from typing import Any

import bench_pairs as paired
import bench_report as report

METRICS = {"call": "CPU time of the call", "done": "to completion"}


def print_launch(results: list[dict[str, Any]], rival: str) -> None:
    head = ["world x size", "what", "ft us", f"{rival} us", f"ft/{rival}"]
    head += ["95 % of it", "width", "pairs"]
    rows = []
    for r in results:
        for metric, text in METRICS.items():
            seconds = r["seconds"][metric]
            times = [f"{seconds[n]['median'] * 1e6:.1f}" for n in seconds]
            times += ["-"] * (2 - len(times))
            ratio = r["ratio_to_rival"].get(metric)
            cells = paired.cells_of(ratio) if ratio else ["-"] * 3
            place = f"{r['world']} x {report.format_bytes(r['bytes'])}"
            rows.append([place, text, *times, *cells, str(r["pairs"])])
    report.print_table(head, rows)


def print_abort(results: list[dict[str, Any]]) -> None:
    rows = [
        [f"{r['operations_under_way']} under way", name, *ms_of(summary), str(summary["count"])]
        for r in results
        for name, summary in r["seconds"].items()
    ]
    report.print_table(["abort", "until", "median ms", "p99 ms", "max ms", "aborts"], rows)


def print_configure(results: list[dict[str, Any]]) -> None:
    rows = [
        [f"{r['engine']}, world {r['world']}", name, *ms_of(summary), str(summary["count"])]
        for r in results
        for name, summary in r["seconds"].items()
    ]
    report.print_table(
        ["configure", "generation", "median ms", "p99 ms", "max ms", "generations"], rows
    )


def print_memory(results: list[dict[str, Any]], simulated: bool) -> None:
    rows = [
        [r["engine"], f"{r['bytes_per_group'] if simulated else r['bytes_per_group'] / 2**20:.1f}"]
        for r in results
    ]
    report.print_table(["group", "allocations" if simulated else "MiB"], rows)


def ms_of(summary: dict[str, float]) -> list[str]:
    return [report.format_ms(summary[key]) for key in ("median", "p99", "max")]


MIN_PAIRS, MAX_WIDTH, ABORT_LIMIT_S = 30, 0.10, 0.5


def verdict(reached: bool, known: bool = True) -> str:
    if not known:
        return "undecided"
    return "reached" if reached else "NOT reached"


def no_slower(ratio: dict[str, Any], pairs: int) -> str:
    low, high = ratio["interval95"]
    narrow = pairs >= MIN_PAIRS and ratio["relative_width"] <= MAX_WIDTH
    return verdict(low <= 1, known=narrow or low > 1 or high <= 1)


def aims(results: dict[str, Any]) -> dict[str, str]:
    """What is aimed at, and whether these figures show it.

    Where ranks share a device, the time to completion is that of its time slices: not judged.
    """
    found: dict[str, str] = {}
    for r in results.get("launch", ()):
        for metric, ratio in r["ratio_to_rival"].items():
            if metric == "done" and r["ranks_share_a_device"]:
                continue
            name = f"{METRICS[metric]}, {r['world']} x {report.format_bytes(r['bytes'])}"
            found[f"no slower than the rival: {name}"] = no_slower(ratio, r["pairs"])
    for r in results.get("abort", ()):
        name = f"stream free within {ABORT_LIMIT_S} s, {r['operations_under_way']} under way"
        found[name] = verdict(r["seconds"]["stream free"]["max"] <= ABORT_LIMIT_S)
    configured = [r for r in results.get("configure", ()) if "road" not in r]
    by_engine = {(r["engine"], r["world"]): r["seconds"] for r in configured}
    for (engine, world), rival in by_engine.items():
        if engine != "ft":
            ours = by_engine["ft", world]["warm"]["median"]
            name = f"warm configure no slower than destroy + init, world {world}"
            found[name] = verdict(ours <= rival["warm"]["median"])
    return found


def print_part(part: str, results: list[dict[str, Any]], *, rival: str, simulated: bool) -> None:
    """One table."""
    if part == "launch":
        print_launch(results, rival)
    elif part == "abort":
        print_abort(results)
    elif part == "configure":
        print_configure(results)
    else:
        print_memory(results, simulated)
