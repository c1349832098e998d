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

import os
import subprocess
import sys
import time
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


def measure(steps: int) -> list[float]:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    x = torch.ones(BATCH, WIDTH)
    times = []
    for _ in range(steps + WARM_UP):
        start = time.monotonic()
        model.zero_grad()
        model(x).square().mean().backward()
        times.append(time.monotonic() - start)
    return times[WARM_UP:]


def rank_main() -> None:
    for command in ranks.commands():
        store = dist.TCPStore("127.0.0.1", command["port"], is_master=False, wait_for_workers=False)
        if command["backend"] == "fake":
            import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers it
        dist.init_process_group(
            command["backend"], store=store, rank=command["rank"], world_size=command["world"]
        )
        ranks.reply("measured", times=measure(command["steps"]))
        dist.destroy_process_group()


def python_world(world: int, steps: int, backend: str) -> list[float]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ranks.Pool(__file__) as pool:
        processes = pool.start(world)
        for rank, process in enumerate(processes):
            told = {"steps": steps, "port": store.port, "backend": backend}
            process.send("run", rank=rank, world=world, **told)
        answers = pool.gather(processes, "measured", LIMIT_S)
        pool.finish(processes)
    times: list[float] = answers[0]["times"]
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


def run_world(world: int, steps: int, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"c++": [], "python": [], "free": []}
    for _ in range(rounds):
        times["c++"] += native_world(world, steps)
        times["python"] += python_world(world, steps, "ft")
        times["free"] += python_world(world, steps, "fake")
    seconds = {name: report.summary(each) for name, each in times.items()}
    share = seconds["free"]["median"] / seconds["python"]["median"]
    return {"world": world, "rounds": rounds, "seconds": seconds, "free_share": share}


def main() -> int:
    parser = report.make_parser(__doc__, quick="one round of 20 steps, 2 ranks")
    parser.add_argument("--worlds", type=report.comma_list(int), help="default 2,4")
    parser.add_argument("--steps", type=int, help="of a round; default 200")
    parser.add_argument("--rounds", type=int, help="default 3")
    arguments = parser.parse_args()
    if arguments.rank_process:
        rank_main()
        return 0
    native.program("ddp_step")
    os.environ["OMP_NUM_THREADS"] = "1"
    quick = arguments.quick
    run = report.describe_run(arguments)
    results = []
    for world in arguments.worlds or ([2] if quick else [2, 4]):
        ranks.progress(f"{world} ranks")
        steps, rounds = (
            arguments.steps or (20 if quick else 200),
            arguments.rounds or (1 if quick else 3),
        )
        results.append(run_world(world, steps, rounds))
    report.print_machine(run)
    rows = [
        [str(r["world"]), name, report.format_ms(each["median"]), report.format_ms(each["p99"])]
        for r in results
        for name, each in r["seconds"].items()
    ]
    report.print_table(["ranks", "DDP in", "median ms", "p99 ms"], rows)
    for result in results:
        print(f"{result['world']} ranks: free / python = {result['free_share']:.2f}")
    report.write_json(arguments.json, {"benchmark": "ddp_step", **run, "results": results})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except native.NotBuilt as error:
        sys.exit(str(error))
