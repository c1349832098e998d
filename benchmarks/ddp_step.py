#!/usr/bin/env python3
"""How long a step of DistributedDataParallel takes in C++ and in Python, beside a free one.

The same model, data and backend: eight layers of 256 x 256, batches of 32, one thread. A step is
zero_grad(), forward() and backward(). Worlds of C++ ranks (benchmarks/native/ddp_step.cpp), of
Python ranks, and of Python ranks on torch's "fake" backend alternate. The fake one exchanges
nothing, so its step is the one that communication which costs nothing would give. The share is how
much of Python's step that is. The times are rank 0's.

    make bench-native builds the C++ program
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from typing import Any

import bench_native as native
import bench_ranks as ranks
import bench_report as report
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, BATCH = 8, 256, 32
WARM_UP = 20
LIMIT_S = 300


def given_back(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A bucket's gradients as they are, at once."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def measure(command: ranks.Message) -> ranks.Message:
    rank, world = command["rank"], command["world"]
    backend = command["backend"]
    if backend == "fake":
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    dist.init_process_group(backend, store=ranks.connect_store(), rank=rank, world_size=world)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    if backend == "fake":  # its futures have no tensors, which the reducer wants
        model.register_comm_hook(None, lambda _, bucket: given_back(bucket))
    x = torch.ones(BATCH, WIDTH)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return {"times": ranks.time_calls(step, WARM_UP + command["steps"])[WARM_UP:]}


def python_world(world: int, steps: int, backend: str) -> list[float]:
    found = ranks.run_world(__file__, world, LIMIT_S, steps=steps, backend=backend)
    times: list[float] = found[0]["times"]
    return times


def native_world(world: int, steps: int) -> list[float]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [str(native.program("ddp_step")), str(store.port), "step"]
    counts = [str(world), str(steps), str(WARM_UP)]
    running = [
        subprocess.Popen([*command, str(rank), *counts], stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise SystemExit("ddp_step failed")
    return [float(line) for line in outputs[0].splitlines()]


def measure_world(world: int, steps: int, rounds: int) -> dict[str, Any]:
    ranks.progress(f"{world} ranks")
    times: dict[str, list[float]] = {"c++": [], "python": [], "free": []}
    for _ in range(rounds):
        times["c++"] += native_world(world, steps)
        times["python"] += python_world(world, steps, "ft")
        times["free"] += python_world(world, steps, "fake")
    seconds = {name: report.summary(each) for name, each in times.items()}
    share = seconds["free"]["median"] / seconds["python"]["median"]
    return {"world": world, "rounds": rounds, "seconds": seconds, "free_share": share}


def measure_worlds(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [measure_world(w, arguments.steps, arguments.rounds) for w in arguments.worlds]


def print_results(results: list[dict[str, Any]]) -> None:
    rows = [
        [str(r["world"]), name, report.format_ms(each["median"]), report.format_ms(each["p99"])]
        for r in results
        for name, each in r["seconds"].items()
    ]
    report.print_table(["ranks", "DDP in", "median ms", "p99 ms"], rows)
    for result in results:
        print(f"{result['world']} ranks: free / python = {result['free_share']:.2f}")


def parse_arguments() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="one round of 20 steps, 2 ranks")
    parser.add_argument("--worlds", type=report.comma_list(int), help="default 2,4")
    parser.add_argument("--steps", type=int, help="of a round; default 200")
    parser.add_argument("--rounds", type=int, help="default 3")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.worlds = arguments.worlds or ([2] if quick else [2, 4])
    arguments.steps = arguments.steps or (20 if quick else 200)
    arguments.rounds = arguments.rounds or (1 if quick else 3)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.rank_process:
        return ranks.answer(measure)
    native.program("ddp_step")
    os.environ["OMP_NUM_THREADS"] = "1"
    return report.run_benchmark("ddp_step", arguments, measure_worlds, print_results)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except native.NotBuilt as error:
        sys.exit(str(error))
