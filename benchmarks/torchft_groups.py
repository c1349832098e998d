#!/usr/bin/env python3
"""This package's groups beside those of torchft: in the process, and in children ("Baby").

Measures, in worlds of --worlds:
  configure   a group's first configure(); then re-configure: the same object, live members; of our
              Baby groups each with a spare that has started
  memory      of a child, private to it, after re-configuring and one sum (not of torchft's)
  allreduce   float32 of --sizes, issue to wait()'s return, on the slowest rank
  kill        torchft's Managers and lighthouse: from the SIGKILL of one replica to the last
              survivor's failed sum, where the kill fell into one; to the new quorum, with the
              lighthouse's heartbeat limit in it; to the end of configure(); to the next commit
  freeze      the same from a SIGSTOP; the frozen replica is killed when the others have committed.
              A frozen member of our groups is told after a second; torchft's groups have their
              timeout alone, five seconds here, and fifteen where a child has to start
              Where members of a group of torchft's do not commit any more for a minute, before or
              after a strike, a row says so, and the engine's strikes in that world end there

All engines in one run, in alternate rounds, each in processes of its own. Needs torchft 0.2.0. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import bench_ranks as ranks
import bench_report as report
import torch
import torch.distributed as dist
from bench_managers import (
    LIMIT,
    MOST_OF_RECOVERY_S,
    OF_TORCHFT,
    ManagedJob,
    Replica,
    has_spare,
    make_group,
)

ENGINES = ("torchft.Gloo", "Gloo", "Host", "torchft.BabyGloo", "BabyGloo", "BabyHost")
MEMORY = "a child's private memory"
WARM_UP = 3
RE_CONFIGURES = 5
NEVER = " and no commit any more, after"
STEP_BYTES = 2**24  # of the sum of one step: strikes fall into it
STRIKES = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
PHASES = {"failed": "error", "asked": "quorum", "configured": "configured", "committed": "commit"}
Message = dict[str, Any]
kept: list[Any] = []  # groups, until all ranks have finished with them


# ---- in a rank ----


def await_spare(group: Any) -> None:
    """Have what comes next find a child that has started."""
    limit = time.monotonic() + LIMIT.total_seconds()
    while not has_spare(group):
        if time.monotonic() > limit:
            raise RuntimeError("no spare")
        time.sleep(0.01)


def private_bytes(group: Any) -> list[int]:
    """Of the group's child; none: it has none that it tells of."""
    if not hasattr(group, "child_pid"):
        return []
    lines = Path(f"/proc/{group.child_pid()}/smaps_rollup").read_text().splitlines()
    sizes = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return [1024 * sum(sizes)]


def time_configure(command: Message) -> None:
    """The first of a fresh object, and the next ones."""
    group, times = make_group(command["engine"]), []
    kept.append(group)
    for number in range(1 + command["configures"]):
        place = f"{command['place']}/{number}"
        if number > 0:
            await_spare(group)
            group.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()  # together
        start = time.monotonic()
        group.configure(place, "replica", command["rank"], command["world"])
        times.append(time.monotonic() - start)
        group.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
    await_spare(group)  # which would take the processor from the sums
    ranks.reply("configured", seconds=times, private=private_bytes(group))
    time_sums(group, command)


def time_sums(group: Any, command: Message) -> None:
    times: dict[str, list[float]] = {}
    for size in command["sizes"]:
        tensor, options = torch.ones(max(size // 4, 1)), dist.AllreduceOptions()
        times[str(size)] = []
        for number in range(WARM_UP + command["count"]):
            tensor.fill_(1.0)
            group.allreduce([torch.ones(1)], options).wait()  # together
            start = time.monotonic()
            group.allreduce([tensor], options).wait()
            if number >= WARM_UP:
                times[str(size)].append(time.monotonic() - start)
        if tensor[0].item() != command["world"]:
            raise RuntimeError(f"{size} B: the sum of ones is {tensor[0].item()}")
    ranks.reply("summed", seconds=times)


def rank_main() -> None:
    for command in ranks.commands():
        if command["cmd"] == "groups":
            time_configure(command)
        else:
            Replica(command).run()


# ---- in the launcher ----


def run_groups(engine: str, world: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """One round; for each measurement, the slowest rank's times."""
    with ranks.Pool(__file__) as pool:
        processes = pool.start(world)
        for rank, process in enumerate(processes):
            process.send(
                "groups",
                engine=engine,
                rank=rank,
                world=world,
                count=arguments.count,
                configures=min(arguments.count, RE_CONFIGURES),
                sizes=arguments.sizes,
                place=f"{pool.address}/groups",
            )
        configured = pool.gather(processes, "configured", 300)
        summed = pool.gather(processes, "summed", 600)
        pool.finish(processes)
    slowest = [max(times) for times in zip(*(a["seconds"] for a in configured), strict=True)]
    found = {"configure": slowest[:1], "re-configure": slowest[1:]}
    for size in arguments.sizes:
        by_rank = (answer["seconds"][str(size)] for answer in summed)
        found[f"allreduce {report.format_bytes(size)}"] = [
            max(times) for times in zip(*by_rank, strict=True)
        ]
    if private := [size for answer in configured for size in answer["private"]]:
        found[MEMORY] = private
    return found


def run_strikes(engine: str, world: int, strikes: list[str]) -> dict[str, list[float]]:
    """One job in which one replica after the other is struck and replaced."""
    found: dict[str, list[float]] = {}
    with (
        ranks.Pool(__file__) as pool,
        ManagedJob(pool, engine, world, len(strikes), size=STEP_BYTES) as job,
    ):
        for number, strike in enumerate(strikes):
            try:
                struck = job.strike(STRIKES[strike])
            except ranks.RankFailed as failure:
                if not engine.startswith(OF_TORCHFT):
                    raise
                ranks.progress(f"{engine}, {strike} {number + 1}: {failure}")
                found[f"{strike} {number + 1}{NEVER}"] = [MOST_OF_RECOVERY_S]
                break
            note_phases(found, strike, struck.when, struck.answers)
    return found


def note_phases(
    found: dict[str, list[float]], strike: str, struck: float, answers: list[Message]
) -> None:
    """Add the last survivor's times; of the error where all have one."""
    for phase, name in PHASES.items():
        times = [answer[phase] for answer in answers]
        if all(times):
            found.setdefault(f"{strike} to last {name}", []).append(max(times) - struck)


def measure_world(world: int, arguments: argparse.Namespace) -> list[Message]:
    engines = arguments.engines
    found: dict[str, dict[str, list[float]]] = {engine: {} for engine in engines}
    for number in range(arguments.rounds):
        for engine in engines:
            ranks.progress(f"world {world}: {engine}, round {number + 1} of {arguments.rounds}")
            for what, times in run_groups(engine, world, arguments).items():
                found[engine].setdefault(what, []).extend(times)
    strikes = ["kill"] * arguments.kills + ["freeze"] * arguments.freezes
    for engine in engines if strikes else ():
        ranks.progress(f"world {world}: {engine}, {', '.join(strikes)}")
        found[engine].update(run_strikes(engine, world, strikes))
    return [
        {"engine": engine, "world": world, "what": what, unit_of(what): report.summary(times)}
        for engine in engines
        for what, times in found[engine].items()
        if times
    ]


def unit_of(what: str) -> str:
    return "bytes" if what == MEMORY else "seconds"


def print_results(results: list[Message], engines: list[str]) -> None:
    """One row for each measurement, one column for each engine: medians."""
    medians = {
        (r["world"], r["what"], r["engine"]): r[unit_of(r["what"])]["median"] for r in results
    }
    rows = []
    for world, what in dict.fromkeys((r["world"], r["what"]) for r in results):
        found = [medians.get((world, what, engine)) for engine in engines]
        form = report.format_ms if unit_of(what) == "seconds" else format_mib
        rows.append([what, str(world), *("-" if one is None else form(one) for one in found)])
    report.print_table(["median ms; MiB", "world", *engines], rows)


def format_mib(size: float) -> str:
    return f"{size / 2**20:.1f}"


def names(text: str) -> list[str]:
    return text.split(",")


def parse_arguments() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="world 2, one round of 3, one kill, one freeze")
    sizes = report.comma_list(report.parse_bytes)
    parser.add_argument("--worlds", type=report.comma_list(int), help="default 2,3,4")
    parser.add_argument("--sizes", type=sizes, default=[4, 65536, 2**20, 2**26], help="bytes")
    parser.add_argument("--engines", type=names, default=list(ENGINES), help=",".join(ENGINES))
    parser.add_argument("--count", type=int, help="of each sum, per round; default 20")
    parser.add_argument("--rounds", type=int, help="of configures and sums; default 1; 0: none")
    parser.add_argument("--kills", type=int, help="of each engine; default 3; 0: none")
    parser.add_argument("--freezes", type=int, help="of each engine; default 2; 0: none")
    arguments = parser.parse_args()
    defaults = {"worlds": [2, 3, 4], "count": 20, "rounds": 1, "kills": 3, "freezes": 2}
    if arguments.quick:
        defaults = {"worlds": [2], "count": 3, "rounds": 1, "kills": 1, "freezes": 1}
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.rank_process:
        rank_main()
        return 0
    run = report.describe_run(arguments)
    results = [result for world in arguments.worlds for result in measure_world(world, arguments)]
    report.print_machine(run)
    print_results(results, arguments.engines)
    written = {"benchmark": "torchft_groups", **run, "results": results}
    report.write_json(arguments.json, written)
    print(json.dumps(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
