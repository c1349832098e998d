#!/usr/bin/env python3
"""The small collectives of serving engines' steps: on ft, on gloo, and by the engines' own ways.

int32 on the CPU, synchronous. vLLM's way is its cpu_all_reduce_() and SGLang's its
exchange_sync_rows(), both over gloo, from the engines themselves: scripts/check_serving.sh makes
the environment. All take turns in one run, in random order. A time is one call's, the slowest
rank's; the bytes are those of one rank. A ratio is the median over turns that are side by side.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
WAYS = ("ft", "gloo", "vLLM on gloo", "SGLang on gloo")

Groups = dict[str, dist.ProcessGroup]


# ---- in a rank ----


@dataclass
class Case:
    """One operation of one size: its tensors, and the ways to run it."""

    given: torch.Tensor
    result: torch.Tensor  # of a sum: the tensor that was given
    wanted: torch.Tensor  # where each rank gives its number, from 1
    calls: dict[str, Callable[[], object]]

    def check(self, rank: int) -> None:
        """Raise RuntimeError where a way's result is wrong."""
        for way, call in self.calls.items():
            self.result.fill_(-1)
            self.given.fill_(rank + 1)
            call()
            if not torch.equal(self.result, self.wanted):
                raise RuntimeError(f"{way}: {self.result.tolist()}, wanted {self.wanted.tolist()}")
        self.given.zero_()  # sums of zeros stay zeros, however often they are summed

    def timed(self, way: str) -> paired.Turn:
        """One turn."""
        ranks.time_calls(self.calls[way], WARM_UP)
        return ranks.time_calls(self.calls[way], BLOCK)


def make_groups(command: ranks.Message) -> Groups:
    rank, world = command["rank"], command["world"]
    store = ranks.connect_store()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=LIMIT)
    assert dist.group.WORLD is not None
    return {"gloo": dist.group.WORLD, "ft": dist.new_group(backend="ft", timeout=LIMIT)}


def all_reduce(groups: Groups, numbers: int) -> Case:
    from vllm.distributed.utils import cpu_all_reduce_

    world = dist.get_world_size()
    tensor = torch.zeros(numbers, dtype=torch.int32)
    wanted = torch.full_like(tensor, world * (world + 1) // 2)
    calls: dict[str, Callable[[], object]] = {
        "ft": lambda: dist.all_reduce(tensor, group=groups["ft"]),
        "gloo": lambda: dist.all_reduce(tensor, group=groups["gloo"]),
        "vLLM on gloo": lambda: cpu_all_reduce_(tensor, groups["gloo"]),
    }
    return Case(tensor, tensor, wanted, calls)


def all_gather(groups: Groups, numbers: int) -> Case:
    import sglang_step  # of examples/serving

    exchange_sync_rows = sglang_step.load().exchange_sync_rows
    world = dist.get_world_size()
    row = torch.zeros(numbers, dtype=torch.int32)
    rows = torch.zeros(numbers * world, dtype=torch.int32)
    wanted = torch.arange(1, world + 1, dtype=torch.int32).repeat_interleave(numbers)
    calls: dict[str, Callable[[], object]] = {
        "ft": lambda: dist.all_gather_into_tensor(rows, row, group=groups["ft"]),
        "gloo": lambda: dist.all_gather_into_tensor(rows, row, group=groups["gloo"]),
        "SGLang on gloo": lambda: exchange_sync_rows(rows, row, groups["gloo"]),
    }
    return Case(row, rows, wanted, calls)


CASES = {"all_reduce": all_reduce, "all_gather": all_gather}


def measure(command: ranks.Message) -> ranks.Message:
    """By operation and size, each way's turns."""
    groups = make_groups(command)
    found: dict[str, dict[str, dict[str, list[paired.Turn]]]] = {}
    for operation, make in CASES.items():
        found[operation] = {}
        for size in SIZES:
            case = make(groups, size // 4)
            case.check(command["rank"])
            turns = paired.take_turns(
                list(case.calls), command["turns"], command["seed"], case.timed
            )
            found[operation][str(size)] = turns
    return {"found": found}


# ---- in the launcher ----


def evaluate(operation: str, size: int, by_rank: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """A row: each way's times, and ft's median over the others', turn by turn."""
    turns = {way: paired.slowest_rank([each[way] for each in by_rank]) for way in by_rank[0]}
    times = {way: [time for turn in each for time in turn] for way, each in turns.items()}
    ratios = {way: paired.compare(turns["ft"], turns[way], seed) for way in turns if way != "ft"}
    return {
        "op": operation,
        "world": len(by_rank),
        "bytes": size,
        "seconds": {way: report.summary(each) for way, each in times.items()},
        "ft_share_of": {way: ratio["median"] for way, ratio in ratios.items()},
        "interval95_of_share": {way: ratio["interval95"] for way, ratio in ratios.items()},
    }


def measure_world(world: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    ranks.progress(f"{world} ranks")
    told = {"turns": arguments.turns, "seed": arguments.seed}
    answers = ranks.run_world(__file__, world, 3600, **told)
    return [
        evaluate(
            operation,
            size,
            [answer["found"][operation][str(size)] for answer in answers],
            arguments.seed,
        )
        for operation in CASES
        for size in SIZES
    ]


def measure_worlds(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found = [row for world in arguments.world for row in measure_world(world, arguments)]
    return sorted(found, key=lambda row: list(CASES).index(row["op"]))


def parse_arguments() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="3 turns of each, 2 and 4 ranks")
    parser.add_argument("--world", type=report.comma_list(int), help="default 2,4,8,16")
    parser.add_argument("--turns", type=int, help="of 20 calls; default 50")
    parser.add_argument("--seed", type=int, default=1, help="of the order of turns")
    arguments = parser.parse_args()
    arguments.world = arguments.world or ([2, 4] if arguments.quick else [2, 4, 8, 16])
    arguments.turns = arguments.turns or (3 if arguments.quick else 50)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.rank_process:
        return ranks.answer(measure)
    show = partial(report.print_shares, names=WAYS)
    return report.run_benchmark("serving", arguments, measure_worlds, show)


if __name__ == "__main__":
    sys.exit(main())
