#!/usr/bin/env python3
"""How long one allreduce takes: ft beside gloo, in the same processes and the same minutes.

Both groups stand side by side in every rank. For each size they take turns in random order. One
turn is a barrier, one untimed allreduce, and a block of timed ones, issued one after the other. A
time counts from the call to wait()'s return on the slowest rank. One ft turn and one gloo turn make
a pair; the ratio of their medians is taken pair by pair, so that what the machine does meanwhile
touches both alike.

A size is measured until the 95 % interval of that ratio is narrow enough (--width), in rounds of
--pairs pairs, or until --most pairs have been taken: the last column says which. A row whose
interval is still wide after --most pairs, as on a busy machine, needs a higher --most.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from typing import Any

import bench_pairs as paired
import bench_ranks as ranks
import bench_report as report
import torch
import torch.distributed as dist

DEFAULT_SIZES = "4,1K,32K,256K,1M,4M,16M,64M"
QUICK_SIZES = "4,64K,4M"
TURN_LIMIT_S = 120.0


def block_length(size: int) -> int:
    """Operations per turn: more of the short ones, whose single times are noisy."""
    return 30 if size <= 64 * 2**10 else 10 if size <= 4 * 2**20 else 2


# ---- in a rank ----


def timed_block(group: dist.ProcessGroup, tensor: torch.Tensor, count: int) -> list[float]:
    dist.barrier(group)
    dist.all_reduce(tensor, group=group)
    return ranks.time_calls(lambda: dist.all_reduce(tensor, group=group), count)


def check_sum(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    tensor.fill_(dist.get_rank() + 1)
    dist.all_reduce(tensor, group=group)
    world = dist.get_world_size()
    if not bool((tensor == world * (world + 1) / 2).all()):
        raise RuntimeError(f"wrong sum over {tensor.numel()} elements")
    tensor.zero_()  # sums of zeros stay zeros, however often they are summed


def measure(
    groups: dict[str, dist.ProcessGroup], size: int, dtype: str, pairs: int, seed: int
) -> dict[str, list[list[float]]]:
    tensor = torch.zeros(max(1, size // 4), dtype=getattr(torch, dtype))
    for group in groups.values():
        check_sum(group, tensor)

    def turn(name: str) -> list[float]:
        return timed_block(groups[name], tensor, block_length(size))

    return paired.take_turns(list(groups), pairs, seed, turn)


def rank_main() -> None:
    import torchft_ext  # noqa: F401  ("ft" is known without it once the package is installed)

    store = ranks.connect_store()
    for command in ranks.commands():
        if command["cmd"] == "init":
            limit = timedelta(seconds=TURN_LIMIT_S)
            dist.init_process_group(
                "ft", store=store, rank=command["rank"], world_size=command["world"], timeout=limit
            )
            assert dist.group.WORLD is not None
            groups = {"ft": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=limit)}
            ranks.reply("ready")
        else:
            size, dtype = command["size"], command["dtype"]
            turns = measure(groups, size, dtype, command["pairs"], command["seed"])
            ranks.reply("measured", turns=turns)
    dist.destroy_process_group()


# ---- in the launcher ----


def evaluate(
    turns: dict[str, list[list[float]]], world: int, size: int, seed: int
) -> dict[str, Any]:
    seconds = {name: report.summary([t for turn in turns[name] for t in turn]) for name in turns}
    return {
        "world": world,
        "bytes": size,
        "pairs": len(turns["ft"]),
        "operations_per_turn": block_length(size),
        "seconds": seconds,
        "ratio_ft_to_gloo": paired.compare(turns["ft"], turns["gloo"], seed),
    }


def measure_size(
    pool: ranks.Pool,
    processes: list[Any],
    world: int,
    size: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    turns: dict[str, list[list[float]]] = {"ft": [], "gloo": []}

    def round_of(taken: int) -> tuple[dict[str, Any], int, float]:
        ranks.progress(f"world {world}: {report.format_bytes(size)}, {taken} pairs so far")
        for process in processes:
            seed = arguments.seed + taken
            asked = {"size": size, "dtype": arguments.dtype, "pairs": arguments.pairs}
            process.send("measure", **asked, seed=seed)
        answers = pool.gather(processes, "measured", TURN_LIMIT_S * 5)
        for name, more in turns.items():
            more.extend(paired.slowest_rank([answer["turns"][name] for answer in answers]))
        result = evaluate(turns, world, size, arguments.seed)
        return result, result["pairs"], result["ratio_ft_to_gloo"]["relative_width"]

    return paired.repeat_until_narrow(round_of, arguments)


def measure_world(world: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    with ranks.Pool(__file__) as pool:
        processes = pool.start(world)
        for rank, process in enumerate(processes):
            process.send("init", rank=rank, world=world)
        pool.gather(processes, "ready", 120)
        results = [
            measure_size(pool, processes, world, size, arguments) for size in arguments.sizes
        ]
        pool.finish(processes)
    return results


def measure_worlds(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [result for world in arguments.worlds for result in measure_world(world, arguments)]


def print_results(results: list[dict[str, Any]]) -> None:
    rows = []
    for r in results:
        ft, gloo, ratio = r["seconds"]["ft"], r["seconds"]["gloo"], r["ratio_ft_to_gloo"]
        cells = [f"{r['world']} x {report.format_bytes(r['bytes'])}"]
        cells += [
            report.format_ms(v) for v in (ft["median"], gloo["median"], ft["p99"], gloo["p99"])
        ]
        rows.append([*cells, *paired.cells_of(ratio), str(r["pairs"])])
    head = ["world x size", "ft ms", "gloo ms", "ft p99", "gloo p99"]
    head += ["ft/gloo", "95 % of it", "width", "pairs"]
    report.print_table(head, rows)


def parse_arguments() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="three sizes, 5 pairs")
    sizes = report.comma_list(report.parse_bytes)
    parser.add_argument("--worlds", type=report.comma_list(int), default=[2, 4], help="default 2,4")
    parser.add_argument(
        "--sizes", type=sizes, help=f"in bytes, with K, M, G; default {DEFAULT_SIZES}"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "int32"), default="float32", help="default float32"
    )
    paired.add_arguments(parser, pairs=40, most=5000)
    arguments = parser.parse_args()
    arguments.sizes = arguments.sizes or sizes(QUICK_SIZES if arguments.quick else DEFAULT_SIZES)
    paired.fill_in(arguments, pairs=40, most=5000)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.rank_process:
        rank_main()
        return 0
    return report.run_benchmark("allreduce", arguments, measure_worlds, print_results)


if __name__ == "__main__":
    sys.exit(main())
