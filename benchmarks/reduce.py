#!/usr/bin/env python3
"""How fast the engine adds up what ranks send, beside ATen's kernels, on one thread.

The loops alone, in memory: sum, product, minimum and maximum of each type, 32 and 512 KiB.

    make bench-native builds the C++ program, where Google Benchmark is installed (libbenchmark-dev)
"""

from __future__ import annotations

import sys
from typing import Any

import bench_native as native
import bench_report as report

LIMIT_S = 600


def results_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Google Benchmark's results by type, reduction and size; in GB/s."""
    rates: dict[tuple[str, str, int], dict[str, float]] = {}
    for each in found["benchmarks"]:
        kind, reduction, size, source = each["name"].split("/")[:4]
        rates.setdefault((kind, reduction, int(size)), {})[source] = each["bytes_per_second"] / 1e9
    return [
        {"type": kind, "reduction": reduction, "bytes": size, "gb_per_s": by_source}
        for (kind, reduction, size), by_source in rates.items()
    ]


def main() -> int:
    parser = report.make_parser(__doc__, quick="sums of floats, 10 ms each")
    parser.add_argument("--filter", help="a pattern of names, such as float32/sum; default all")
    arguments = parser.parse_args()
    chosen = arguments.filter or ("^float32/sum" if arguments.quick else ".")
    command = [str(native.program("reduce_bench")), f"--benchmark_filter={chosen}"]
    command.append(f"--benchmark_min_time={0.01 if arguments.quick else 0.1}")
    run = report.describe_run(arguments)
    results = results_of(native.run_for_json([*command, "--benchmark_format=json"], LIMIT_S))
    report.print_machine(run)
    rows = [
        [
            one["type"],
            one["reduction"],
            str(one["bytes"]),
            f"{one['gb_per_s']['ft']:.1f}",
            f"{one['gb_per_s']['aten']:.1f}",
            f"{one['gb_per_s']['ft'] / one['gb_per_s']['aten']:.2f}",
        ]
        for one in results
    ]
    report.print_table(["type", "reduction", "bytes", "ft GB/s", "ATen GB/s", "ratio"], rows)
    report.write_json(arguments.json, {"benchmark": "reduce", **run, "results": results})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except native.NotBuilt as error:
        sys.exit(str(error))
