#!/usr/bin/env python3
"""How fast newcomers get a state from a member, beside a plain broadcast of the same bytes.

One member holds the state; --newcomers others have nothing. elastic.sync() and broadcast() of the
same memory alternate in one run. A time is the slowest rank's, from a barrier to its return. In the
last row all hold the same: members compare hashes, and no bytes of tensors travel.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import bench_ranks as ranks
import bench_report as report
import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=300)
TENSORS = 64
LINEAGE = bytes(range(16))
COLD = {"continuing": False, "dirty": True, "lineage": bytes(16)}
WARM = {"continuing": True, "dirty": False, "lineage": LINEAGE}


# ---- in a rank ----


def timed(call: Callable[[], object]) -> float:
    dist.barrier()
    began = time.monotonic()
    call()
    return time.monotonic() - began


def measure(command: ranks.Message) -> ranks.Message:
    from torchft_ext import elastic

    dist.init_process_group(
        "ft",
        store=ranks.connect_store(),
        rank=command["rank"],
        world_size=command["world"],
        timeout=LIMIT,
    )
    flat = torch.ones(command["bytes"] // 4)
    state = elastic.State(list(flat.chunk(TENSORS)))
    holds = command["rank"] == 0 or command["alike"]
    group = dist.group.WORLD
    assert group is not None
    sent: list[int] = []

    def sync() -> None:
        options: Any = WARM if holds else COLD
        sent.append(elastic.sync(state, group, step=0, **options).nbytes)

    times: dict[str, list[float]] = {"sync": [], "broadcast": []}
    for number in range(command["count"] + 1):  # the first warms up
        taken = {"sync": timed(sync), "broadcast": timed(lambda: dist.broadcast(flat, 0))}
        for name, seconds in taken.items():
            times[name] += [seconds] if number else []
    return {"times": times, "nbytes": sent[-1]}


# ---- in the launcher ----


def run_setting(newcomers: int, alike: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    ranks.progress(f"{0 if alike else newcomers} newcomers")
    world = newcomers + 1
    told = {"alike": alike, "bytes": arguments.size, "count": arguments.count}
    answers = ranks.run_world(__file__, world, 600, **told)
    slowest = {
        name: report.summary(
            [max(of) for of in zip(*(a["times"][name] for a in answers), strict=True)]
        )
        for name in ("sync", "broadcast")
    }
    return {
        "newcomers": 0 if alike else newcomers,
        "world": world,
        "bytes": arguments.size,
        "sent": answers[0]["nbytes"],
        "seconds": slowest,
        "of_broadcast_rate": slowest["broadcast"]["median"] / slowest["sync"]["median"],
    }


def measure_settings(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    settings = [(newcomers, False) for newcomers in arguments.newcomers]
    settings.append((max(arguments.newcomers), True))
    return [run_setting(newcomers, alike, arguments) for newcomers, alike in settings]


def print_results(results: list[dict[str, Any]]) -> None:
    rows = []
    for r in results:
        both = [r["seconds"][name]["median"] for name in ("sync", "broadcast")]
        cells = [f"{seconds * 1e3:.0f}" for seconds in both]
        sizes = [report.format_bytes(r["bytes"]), report.format_bytes(r["sent"])]
        rows.append(
            [str(r["world"]), str(r["newcomers"]), *sizes, *cells, f"{r['of_broadcast_rate']:.2f}"]
        )
    head = ["ranks", "newcomers", "state", "sent", "sync ms", "broadcast ms", "of its rate"]
    report.print_table(head, rows)


def parse_arguments() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="64 MiB, 5 times")
    parser.add_argument(
        "--newcomers", type=report.comma_list(int), default=[1, 2, 3], help="default 1,2,3"
    )
    parser.add_argument("--size", type=report.parse_bytes, help="of the state; default 1G")
    parser.add_argument("--count", type=int, help="of each; default 10")
    arguments = parser.parse_args()
    arguments.size = arguments.size or (64 * 2**20 if arguments.quick else 2**30)
    arguments.count = arguments.count or (5 if arguments.quick else 10)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.rank_process:
        return ranks.answer(measure)
    return report.run_benchmark("sync", arguments, measure_settings, print_results)


if __name__ == "__main__":
    sys.exit(main())
