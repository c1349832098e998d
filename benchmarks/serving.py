#!/usr/bin/env python3
"""The small collectives of serving engines' steps: on ft, on gloo, and by the engines' own ways.

int32 on the CPU, synchronous. vLLM's way is its cpu_all_reduce_() and SGLang's its
exchange_sync_rows(), both over gloo, from the engines themselves: scripts/check_serving.sh makes
the environment. All take turns in one run, in random order. A time is one call's, the slowest
rank's; the bytes are those of one rank.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import bench_pairs as paired
import bench_ranks as ranks
import bench_report as report
import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=60)
SIZES = (8, 64, 512, 2048)  # bytes
WARM_UP, BLOCK = 10, 20  # calls of a turn: before those that are timed, and those
REDUCE = ("ft", "gloo", "vLLM on gloo")
GATHER = ("ft", "gloo", "SGLang on gloo")

Call = Callable[[], object]


def make_groups(world: int, rank: int, prefix: str) -> dict[str, dist.ProcessGroup]:
    store = dist.PrefixStore(prefix, ranks.connect_store())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=LIMIT)
    return {"gloo": dist.group.WORLD, "ft": dist.new_group(backend="ft", timeout=LIMIT)}


def reductions(groups: dict[str, dist.ProcessGroup], numbers: int) -> dict[str, Call]:
    from vllm.distributed.utils import cpu_all_reduce_

    tensor = torch.zeros(numbers, dtype=torch.int32)
    return {
        "ft": lambda: dist.all_reduce(tensor, group=groups["ft"]),
        "gloo": lambda: dist.all_reduce(tensor, group=groups["gloo"]),
        "vLLM on gloo": lambda: cpu_all_reduce_(tensor, groups["gloo"]),
    }


def gatherings(groups: dict[str, dist.ProcessGroup], numbers: int) -> dict[str, Call]:
    import sglang_step  # of examples/serving

    exchange_sync_rows = sglang_step.load().exchange_sync_rows
    row = torch.zeros(numbers, dtype=torch.int32)
    rows = torch.empty(numbers * dist.get_world_size(), dtype=torch.int32)
    return {
        "ft": lambda: dist.all_gather_into_tensor(rows, row, group=groups["ft"]),
        "gloo": lambda: dist.all_gather_into_tensor(rows, row, group=groups["gloo"]),
        "SGLang on gloo": lambda: exchange_sync_rows(rows, row, groups["gloo"]),
    }


def timed(call: Call) -> paired.Turn:
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(BLOCK):
        start = time.monotonic()
        call()
        times.append(time.monotonic() - start)
    return times


def timed_of(calls: dict[str, Call], name: str) -> paired.Turn:
    return timed(calls[name])


def measure(world: int, rank: int, turns: int, seed: int) -> dict[str, dict[str, list[Any]]]:
    """By operation and size, each way's turns."""
    groups = make_groups(world, rank, f"serving{world}")
    found = {}
    for size in SIZES:
        for operation, calls_of in (("all_reduce", reductions), ("all_gather", gatherings)):
            calls = calls_of(groups, size // 4)
            found[f"{operation} {size}"] = paired.take_turns(
                list(calls), turns, seed, partial(timed_of, calls)
            )
    return found


def rank_main() -> None:
    for command in ranks.commands():
        found = measure(*(command[name] for name in ("world", "rank", "turns", "seed")))
        ranks.reply("measured", found=found)
    dist.destroy_process_group()


def slowest(by_rank: list[list[paired.Turn]]) -> dict[str, float]:
    """Over the calls of all turns, of the longest time of any rank."""
    return report.summary([each for turn in paired.slowest_rank(by_rank) for each in turn])


def run_world(world: int, turns: int, seed: int) -> dict[str, Any]:
    with ranks.Pool(__file__) as pool:
        processes = pool.start(world)
        for rank, process in enumerate(processes):
            process.send("run", world=world, rank=rank, turns=turns, seed=seed)
        answers = [answer["found"] for answer in pool.gather(processes, "measured", 1200)]
        pool.finish(processes)
    seconds = {
        case: {way: slowest([a[case][way] for a in answers]) for way in answers[0][case]}
        for case in answers[0]
    }
    return {"world": world, "seconds": seconds}


def print_results(results: list[dict[str, Any]]) -> None:
    for operation, ways in (("all_reduce", REDUCE), ("all_gather", GATHER)):
        head = [operation, "ranks", *(f"{way} {k} us" for way in ways for k in ("median", "p99"))]
        rows = []
        for size in SIZES:
            for result in results:
                of = result["seconds"][f"{operation} {size}"]
                figures = [f"{of[way][k] * 1e6:.0f}" for way in ways for k in ("median", "p99")]
                rows.append([report.format_bytes(size), str(result["world"]), *figures])
        report.print_table(head, rows)
        print()


def parse_arguments() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="3 turns of each")
    parser.add_argument(
        "--world", type=report.comma_list(int), default=[2, 4, 8], help="default 2,4,8"
    )
    parser.add_argument("--turns", type=int, help="of 20 calls; default 50")
    parser.add_argument("--seed", type=int, default=1, help="of the order of turns")
    arguments = parser.parse_args()
    arguments.turns = arguments.turns or (3 if arguments.quick else 50)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.rank_process:
        rank_main()
        return 0
    run = report.describe_run(arguments)
    results = []
    for world in arguments.world:
        ranks.progress(f"{world} ranks")
        results.append(run_world(world, arguments.turns, arguments.seed))
    report.print_machine(run)
    print_results(results)
    report.write_json(arguments.json, {"benchmark": "serving", **run, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
