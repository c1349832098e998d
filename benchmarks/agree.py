#!/usr/bin/env python3
"""How long members of an elastic job take to agree on a step, beside a barrier of the same group.

agree() and barrier() alternate in one run, in blocks. A time is one rank's, from the call to its
return; the table has the slowest rank's median. agree() is two rounds of messages, each of which
reaches all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import bench_ranks as ranks
import bench_report as report
import torch.distributed as dist

LIMIT = timedelta(seconds=60)
BLOCK = 50
WARM_UP = 50


def measure(command: ranks.Message) -> ranks.Message:
    from torchft_ext import elastic

    job = elastic.join(f"{command['address']}/agree", size=command["world"], timeout=LIMIT)
    job.recover()
    calls: dict[str, Callable[[], object]] = {
        "agree": lambda: job.agree(True),
        "barrier": dist.barrier,
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        ranks.time_calls(call, WARM_UP)
    for _ in range(command["count"] // BLOCK):
        for name, call in calls.items():
            times[name] += ranks.time_calls(call, BLOCK)
    job.close()
    return {"times": times}


def measure_world(world: int, count: int) -> dict[str, Any]:
    ranks.progress(f"{world} ranks")
    answers = ranks.run_world(__file__, world, 300, count=count)
    slowest = {
        name: max((report.summary(a["times"][name]) for a in answers), key=lambda s: s["median"])
        for name in ("agree", "barrier")
    }
    ratio = slowest["agree"]["median"] / slowest["barrier"]["median"]
    return {"world": world, "seconds": slowest, "barriers": ratio}


def print_results(results: list[dict[str, Any]]) -> None:
    rows = []
    for r in results:
        agree, barrier = r["seconds"]["agree"], r["seconds"]["barrier"]
        micro = [f"{s[k] * 1e6:.0f}" for s in (agree, barrier) for k in ("median", "p99")]
        rows.append([str(r["world"]), *micro, f"{r['barriers']:.2f}"])
    head = ["ranks", "agree us", "p99", "barrier us", "p99", "barriers per agree"]
    report.print_table(head, rows)


def parse_arguments() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="200 calls of each")
    parser.add_argument(
        "--world", type=report.comma_list(int), default=[2, 4, 8], help="default 2,4,8"
    )
    parser.add_argument("--count", type=int, help="calls of each; default 2000")
    arguments = parser.parse_args()
    arguments.count = arguments.count or (200 if arguments.quick else 2000)
    return arguments


def measure_worlds(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [measure_world(world, arguments.count) for world in arguments.world]


def main() -> int:
    arguments = parse_arguments()
    if arguments.rank_process:
        return ranks.answer(measure)
    return report.run_benchmark("agree", arguments, measure_worlds, print_results)


if __name__ == "__main__":
    sys.exit(main())
