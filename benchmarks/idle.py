#!/usr/bin/env python3
"""What the library costs a process that does nothing: wake-ups and CPU time of its threads.

Every rank forms a generation and then rests. Context switches (voluntary: the thread slept and was
woken) and CPU time are read from /proc before and after, per thread. The figures are of all ranks
together: medians over the ranks, and the largest.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import bench_ranks as ranks
import bench_report as report
import torch.distributed as dist

LIMIT = timedelta(seconds=60)
SETTLE_S = 2.0  # until the liveness connections stand and the rendezvous has been cleaned up
Costs = dict[str, dict[str, float]]


# ---- in a rank ----


def _thread_costs() -> Costs:
    """Voluntary switches and CPU seconds so far, by the name of the thread."""
    costs: Costs = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            name = (task / "comm").read_text().strip()
            if name.startswith("ft-"):
                costs[name] = _costs_of(task)
    return costs


def _costs_of(task: Path) -> dict[str, float]:
    status = (task / "status").read_text()
    switches = next(
        int(line.split()[1])
        for line in status.splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )
    nanoseconds = int((task / "schedstat").read_text().split()[0])
    return {"wakeups": switches, "cpu_s": nanoseconds / 1e9}


def run_rank() -> None:
    store = ranks.connect_store()
    for command in ranks.commands():
        rank, world = command["rank"], command["world"]
        first = dist.PrefixStore(command["name"], store)
        dist.init_process_group("ft", store=first, rank=rank, world_size=world, timeout=LIMIT)
        dist.barrier()
        import torchft_ext

        time.sleep(SETTLE_S)
        before, start = _thread_costs(), time.monotonic()
        time.sleep(command["seconds"])
        after, seconds = _thread_costs(), time.monotonic() - start
        monitor = torchft_ext.backend().stats()["monitor"]
        rates = {
            name: {key: (cost[key] - before[name][key]) / seconds for key in cost}
            for name, cost in after.items()
            if name in before
        }
        ranks.reply(
            "idle", rates=rates, connections=0 if monitor is None else monitor["connections"]
        )
    dist.destroy_process_group()  # once all have answered


# ---- in the launcher ----


def measure(pool: ranks.Pool, world: int, seconds: float) -> dict[str, Any]:
    processes = pool.start(world)
    for rank, process in enumerate(processes):
        process.send("idle", rank=rank, world=world, name=f"world{world}", seconds=seconds)
    answers = pool.gather(processes, "idle", 120 + seconds)
    pool.finish(processes)
    threads = {}
    for name in sorted(set.intersection(*(set(answer["rates"]) for answer in answers))):
        wakeups = [answer["rates"][name]["wakeups"] for answer in answers]
        cpu = [answer["rates"][name]["cpu_s"] for answer in answers]
        threads[name] = {
            "wakeups_per_s": report.summary(wakeups),
            "cpu_percent": report.summary([100 * share for share in cpu]),
        }
    return {
        "world": world,
        "connections": [answer["connections"] for answer in answers],
        "threads": threads,
    }


def show(result: dict[str, Any]) -> None:
    print(f"world {result['world']}, liveness connections per process {result['connections']}")
    rows = [
        [
            name,
            f"{cost['wakeups_per_s']['median']:.1f}",
            f"{cost['wakeups_per_s']['max']:.1f}",
            f"{cost['cpu_percent']['median']:.3f}",
            f"{cost['cpu_percent']['max']:.3f}",
        ]
        for name, cost in result["threads"].items()
    ]
    report.print_table(["thread", "wake-ups/s", "max", "CPU %", "max"], rows)
    print()


def main() -> None:
    parser = report.make_parser(__doc__, "2 s at world 2")
    parser.add_argument("--worlds", type=report.comma_list(int), default=[4, 8], metavar="LIST")
    parser.add_argument("--seconds", type=float, default=20.0, help="of rest; default 20")
    arguments = parser.parse_args()
    if arguments.rank_process:
        run_rank()
        return
    if arguments.quick:
        arguments.worlds, arguments.seconds = [2], 2.0
    run = report.describe_run(arguments)
    report.print_machine(run)
    results = []
    with ranks.Pool(str(Path(__file__).resolve())) as pool:
        for world in arguments.worlds:
            results.append(measure(pool, world, arguments.seconds))
            show(results[-1])
    report.write_json(arguments.json, {"benchmark": "idle", **run, "results": results})


if __name__ == "__main__":
    main()
