#!/usr/bin/env python3
"""The engine without Python: ft_bench's operations, and what else it times.

Every operation and size, issue without wait, wait of what is done, agreements of an elastic job,
configure(), abort(), the news of a death, and how long a process of its own takes to its first sum.
A table, and the aims that were missed. The operations beside other libraries: rivals.py.

    make bench-native builds the program; its own --help says more
"""

from __future__ import annotations

import sys
from typing import Any

import bench_native as native
import bench_report as report

LIMIT_S = 1800
# The project's aims: (operation, where in its row, the most).
AIMS = (
    ("agree", ("barriers",), 2.0),
    ("startup", ("seconds", "median"), 0.020),
    ("startup", ("peak_mib",), 15.0),
)


def missed_aims(results: list[dict[str, Any]]) -> list[str]:
    """Say which aims the results miss, each in words."""
    missed = []
    for op, path, most in AIMS:
        for row in results:
            value: Any = row
            if row["op"] == op:
                for name in path:
                    value = value[name]
                if value > most:
                    missed.append(f"{op}: {'.'.join(path)} {value:.3g}, wanted {most:g}")
    return missed


def main() -> int:
    parser = report.make_parser(__doc__, quick="two sizes, 5 rounds, 2 ranks")
    parser.add_argument("--world", type=int, help="default 4")
    parser.add_argument("--op", default="all", help="default all; a list: allreduce,agree")
    parser.add_argument("--max", help="of the sizes; default 64M")
    parser.add_argument("--factor", help="between two sizes; default 4")
    parser.add_argument("--seconds", type=float, help="for each size; default 0.3")
    parser.add_argument("--rounds", type=int, help="of what has no size; default 50")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.world = arguments.world or (2 if quick else 4)
    arguments.max = arguments.max or ("64K" if quick else "64M")
    arguments.factor = arguments.factor or ("16K" if quick else "4")
    arguments.seconds = arguments.seconds or (0.01 if quick else 0.3)
    arguments.rounds = arguments.rounds or (5 if quick else 50)
    run = report.describe_run(arguments)
    command = [str(native.program("ft_bench"))]
    for name in ("world", "op", "max", "factor", "seconds", "rounds"):
        command += [f"--{name}", str(getattr(arguments, name))]
    if arguments.tcp:
        command.append("--tcp")
    table, printed = native.run(command, LIMIT_S)
    report.print_machine(run)
    print("\n".join(table))
    for missed in missed_aims(printed["results"]):
        print(f"aim missed: {missed}")
    report.write_json(
        arguments.json, {"benchmark": "ft_bench", **run, "results": printed["results"]}
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except native.NotBuilt as error:
        sys.exit(str(error))
