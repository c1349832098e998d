#!/usr/bin/env python3
"""How long live processes take to begin a new generation: configure() beside gloo's destroy and
init.

The processes and their store clients stand; before each generation all ranks meet in a barrier. A
time is that of the slowest rank, from its call to its return. The phases are that rank's, from
stats()["last_configure_ms"]. Both libraries run in processes of their own, in alternate rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import bench_ranks as ranks
import bench_report as report
import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=60)
WARM_UP = 3
SETTLE_S = 0.02  # after the barrier, so that its last bytes are read before the connections go

Begin = Callable[[str], None]  # begins the generation of that name


# ---- in a rank ----


def begin_with_ft(store: dist.Store, address: str, rank: int, world: int) -> Begin:
    import torchft_ext

    first = dist.PrefixStore("first", store)
    dist.init_process_group("ft", store=first, rank=rank, world_size=world, timeout=LIMIT)
    backend = torchft_ext.backend()

    def begin(name: str) -> None:
        backend.configure(f"{address}/{name}", rank, world, timeout=LIMIT)

    return begin


def begin_with_gloo(store: dist.Store, rank: int, world: int) -> Begin:
    def init(name: str) -> None:
        prefixed = dist.PrefixStore(name, store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world, timeout=LIMIT)

    def begin(name: str) -> None:
        dist.destroy_process_group()
        init(name)

    init("first")
    return begin


def phases_of(engine: str) -> dict[str, float]:
    if engine != "ft":
        return {}
    import torchft_ext

    return dict(torchft_ext.backend().stats()["last_configure_ms"])


def time_generations(begin: Begin, engine: str, count: int) -> list[dict[str, Any]]:
    generations = []
    for number in range(WARM_UP + count):
        dist.barrier()
        time.sleep(SETTLE_S)
        start = time.monotonic()
        begin(f"generation{number}")
        seconds = time.monotonic() - start
        ones = torch.ones(1)
        dist.all_reduce(ones)
        if ones.item() != dist.get_world_size():
            raise RuntimeError(f"generation {number}: the sum of ones is {ones.item()}")
        # Now that all are through: stats() counts descriptors, on a core that others may need.
        generations.append({"seconds": seconds, "phases_ms": phases_of(engine)})
    return generations[WARM_UP:]


def measure(command: ranks.Message) -> ranks.Message:
    store = ranks.connect_store()
    rank, world, engine = command["rank"], command["world"], command["engine"]
    if engine == "ft":
        begin = begin_with_ft(store, command["address"], rank, world)
    else:
        begin = begin_with_gloo(store, rank, world)
    return {"generations": time_generations(begin, engine, command["generations"])}


# ---- in the launcher ----


def run_round(engine: str, world: int, generations: int) -> list[dict[str, Any]]:
    """By generation, what the slowest rank measured."""
    limit_s = 120 + 2.0 * generations
    answers = ranks.run_world(__file__, world, limit_s, engine=engine, generations=generations)
    by_generation = zip(*(answer["generations"] for answer in answers), strict=True)
    return [max(same_generation, key=lambda e: e["seconds"]) for same_generation in by_generation]


def evaluate(engine: str, world: int, generations: list[dict[str, Any]]) -> dict[str, Any]:
    names = list(generations[0]["phases_ms"])
    return {
        "engine": engine,
        "world": world,
        "seconds": report.summary([e["seconds"] for e in generations]),
        "phases_ms_median": {
            n: statistics.median(e["phases_ms"].get(n, 0.0) for e in generations) for n in names
        },
    }


def measure_world(world: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    generations: dict[str, list[dict[str, Any]]] = {"ft": [], "gloo": []}
    for number in range(arguments.rounds):
        for engine in generations:
            ranks.progress(f"world {world}: {engine}, round {number + 1} of {arguments.rounds}")
            generations[engine] += run_round(engine, world, arguments.generations)
    return [evaluate(engine, world, generations[engine]) for engine in generations]


def measure_worlds(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [result for world in arguments.worlds for result in measure_world(world, arguments)]


def print_results(results: list[dict[str, Any]]) -> None:
    rows = []
    for r in results:
        s = r["seconds"]
        phases = ", ".join(f"{name} {ms:.2f}" for name, ms in r["phases_ms_median"].items())
        what = "configure()" if r["engine"] == "ft" else "destroy + init"
        row = [f"{r['engine']}: {what}", str(r["world"]), str(s["count"])]
        rows.append(
            [*row, *(report.format_ms(s[k]) for k in ("median", "p99", "max")), phases or "-"]
        )
    head = ["engine", "world", "generations", "median ms", "p99 ms", "max ms", "phases, median ms"]
    report.print_table(head, rows)


def parse_arguments() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="one round of 10 generations")
    parser.add_argument("--worlds", type=report.comma_list(int), default=[2, 4], help="default 2,4")
    parser.add_argument("--generations", type=int, help="per round; default 100")
    parser.add_argument("--rounds", type=int, help="of each library; default 3")
    arguments = parser.parse_args()
    arguments.generations = arguments.generations or (10 if arguments.quick else 100)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.rank_process:
        return ranks.answer(measure)
    return report.run_benchmark("configure", arguments, measure_worlds, print_results)


if __name__ == "__main__":
    sys.exit(main())
