#!/usr/bin/env python3
"""What a c10d group adds to the engine for each call, at world 1, in C++.

Sums of one float, each with its wait(), by the engine alone (torchft_ext::Comm) and by a process
group over it, in turn, in one process without Python. Several processes; times of all calls.

    make bench-native builds the C++ program
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import bench_native as native
import bench_report as report
import torch.distributed as dist

LIMIT_S = 120


def one_process(calls: int) -> dict[str, list[float]]:
    """Seconds of each call, by whom it was made."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [str(native.program("backend_call")), str(store.port), str(calls)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: [float(each) for each in values] for name, *values in lines}


def measure(processes: int, calls: int) -> dict[str, Any]:
    """All processes' calls together."""
    seconds: dict[str, list[float]] = {"engine": [], "group": []}
    for _ in range(processes):
        for name, times in one_process(calls).items():
            seconds[name] += times
    return {"world": 1, "seconds": {name: report.summary(each) for name, each in seconds.items()}}


def main() -> int:
    parser = report.make_parser(__doc__, quick="one process of 1,000 calls")
    parser.add_argument("--processes", type=int, help="default 5")
    parser.add_argument("--calls", type=int, help="of a process; default 20,000")
    arguments = parser.parse_args()
    native.program("backend_call")
    quick = arguments.quick
    run = report.describe_run(arguments)
    result = measure(
        arguments.processes or (1 if quick else 5), arguments.calls or (1000 if quick else 20_000)
    )
    report.print_machine(run)
    rows = [
        [name, f"{each['median'] * 1e6:.2f}", f"{each['p99'] * 1e6:.2f}"]
        for name, each in result["seconds"].items()
    ]
    report.print_table(["sum of one float by", "median us", "p99 us"], rows)
    added = result["seconds"]["group"]["median"] - result["seconds"]["engine"]["median"]
    print(f"the group adds {added * 1e6:.2f} us")
    report.write_json(arguments.json, {"benchmark": "backend_call", **run, "results": [result]})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except native.NotBuilt as error:
        sys.exit(str(error))
