"""What the benchmarks print and write: statistics, tables, the machine, JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bench_ranks as ranks
import torch

Interval = tuple[float, float]
_PLACES = ("json", "picture", "phases_picture")


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, linear between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, p99, extremes and count; p99 of fewer than 100 values is close to the largest."""
    return {
        "count": len(values),
        "median": statistics.median(values),
        "p99": percentile(values, 99),
        "min": min(values),
        "max": max(values),
    }


def bootstrap_median(values: Sequence[float], seed: int, draws: int = 2000) -> Interval:
    """The 95 % interval of the median, by resampling with replacement."""
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _plain(value: object) -> object:
    return value if isinstance(value, (int, float, list)) else str(value)


def describe_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Machine, versions, load and arguments: what a reader needs to judge the figures.

    Without the arguments that say where the files go.
    """
    import torchft_ext

    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
            ),
            "kernel": platform.release(),
            "load_1min_at_start": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "torchft_ext": torchft_ext.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "arguments": {
            name: _plain(value) for name, value in vars(arguments).items() if name not in _PLACES
        },
    }


def run_benchmark(
    name: str,
    arguments: argparse.Namespace,
    measure: Callable[[argparse.Namespace], list[dict[str, Any]]],
    show: Callable[[list[dict[str, Any]]], None],
) -> int:
    """Measure, print the machine and the results, write --json. Returns the exit status."""
    run = describe_run(arguments)
    results = measure(arguments)
    print_machine(run)
    show(results)
    write_json(arguments.json, {"benchmark": name, **run, "results": results})
    return 0


def print_machine(run: dict[str, Any]) -> None:
    machine, versions = run["machine"], run["versions"]
    print(
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, "
        f"load {machine['load_1min_at_start']}; torchft_ext {versions['torchft_ext']}, "
        f"torch {versions['torch']}, Python {versions['python']}\n"
    )


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for number, row in enumerate((head, *rows)):
        numbers = zip(row[1:], widths[1:], strict=True)
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in numbers)]
        print("  ".join(cells).rstrip())
        if number == 0:
            print("  ".join("-" * w for w in widths))
    sys.stdout.flush()


def print_shares(results: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """A table for each operation and world: medians in microseconds, and ft's over the others'.

    results: rows with op, world, bytes, seconds (summaries by name) and ft_share_of (ratios by
    name). names: in the order of the columns; those that no row has are left out.
    """
    for op, world in dict.fromkeys((row["op"], row["world"]) for row in results):
        rows = [row for row in results if (row["op"], row["world"]) == (op, world)]
        present = [name for name in names if name in rows[0]["seconds"]]
        rivals = [name for name in present if name != "ft"]
        table = []
        for row in rows:
            times = [f"{row['seconds'][name]['median'] * 1e6:.1f}" for name in present]
            shares = [_format_share(row["ft_share_of"].get(name, 0)) for name in rivals]
            table.append([format_bytes(row["bytes"]), *times, *shares])
        print(f"\n{op}, {world} ranks")
        head = [f"{name} us" for name in present] + [f"ft/{name}" for name in rivals]
        print_table(["bytes", *head], table)


def _format_share(share: float) -> str:
    return f"{share:.2f}" if share >= 0.1 else f"{share:.4f}"


def write_json(path: Path | None, data: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(data, indent=2) + "\n")
        print(f"\nwritten: {path}")


class TcpAlone(argparse.Action):
    """Ranks, which inherit the environment, are connected as if each had a host of its own."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Note it, and switch local sockets off."""
        setattr(namespace, self.dest, True)
        os.environ["TORCHFT_EXT_LOCAL_SOCKETS"] = "0"


def make_parser(description: str | None, quick: str) -> argparse.ArgumentParser:
    """With the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help=quick + ": shows that it works, no more"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument(
        "--tcp",
        action=TcpAlone,
        nargs=0,
        default=False,
        help="no Unix sockets: TCP between ft's ranks too, as between hosts",
    )
    parser.add_argument(
        ranks.RANK_FLAG, action="store_true", dest="rank_process", help=argparse.SUPPRESS
    )
    return parser


def comma_list(parse: Callable[[str], int]) -> Callable[[str], list[int]]:
    """An argparse type for lists like "2,4"."""

    def convert(text: str) -> list[int]:
        try:
            return [parse(part) for part in text.split(",")]
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"expected a list like 2,4; found {text!r}") from None

    convert.__name__ = "list"
    return convert


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def parse_bytes(text: str) -> int:
    """ "4", "64K", "16M", "1G"."""
    if text and text[-1].upper() in _UNITS:
        return int(text[:-1]) * _UNITS[text[-1].upper()]
    return int(text)


def format_bytes(count: int) -> str:
    for letter, unit in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {letter}iB"
    return f"{count} B"


def format_ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    digits = 3 if milliseconds < 1 else 2 if milliseconds < 10 else 1
    return f"{milliseconds:.{digits}f}"
