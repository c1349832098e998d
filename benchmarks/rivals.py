#!/usr/bin/env python3
"""The collectives of ft beside gloo, Open MPI, MPICH and what shared memory allows.

All with the same operations, sizes and ranks, in turns: in each round every one of them measures
everything once. Items are floats. Memory is allocated before the loop. Each operation is waited for
before the next one; of each the slowest rank's time counts. A figure is the median over the rounds
of their medians.

  ft       ft_bench: processes without Python
  gloo     torch's, by ranks in Python (its C++ headers are in no wheel): a call through Python and
           torch costs it some microseconds that the others do not pay
  openmpi, mpich   benchmarks/rivals/mpi_bench.c, where they are installed. They burn a core while
           they wait
  limit    shm_limit: processes that copy and add through shared memory, and do nothing else. It
           burns a core too

    make bench-native builds the programs
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import bench_mpi as mpi
import bench_native as native
import bench_ranks as ranks
import bench_report as report
import torch
import torch.distributed as dist

OPS = (
    "allreduce",
    "broadcast",
    "allgather",
    "reduce_scatter",
    "reduce",
    "gather",
    "scatter",
    "alltoall",
    "sendrecv",
    "barrier",
)
WITH_PARTS = ("allgather", "reduce_scatter", "gather", "scatter", "alltoall")
NAMES = ("ft", "gloo", *mpi.NAMES, "limit")
LIMIT_S = 1800.0
MOST_ROUNDS = 5000
# Their names since torch 2.13; before: those of before.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
Row = dict[str, Any]
Key = tuple[str, int]  # operation, bytes


# ---- gloo, in a rank ----


class GlooOperation:
    """One operation of one size, on tensors that are there before it is timed."""

    def __init__(self, op: str, size: int) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        parts = self._world if op in WITH_PARTS else 1
        self._count = max(1, size // 4 // parts)
        self.bytes = 0 if op == "barrier" else 4 * self._count * parts
        pattern = torch.arange(self._count, dtype=torch.float32) % 7
        self._pattern = pattern
        self._in = (pattern + self._rank).repeat(parts)
        self._out = torch.zeros(self._count * parts)  # sums in place are of zeros, and stay zeros
        self._ins = list(self._in.chunk(parts))
        self._outs = list(self._out.chunk(parts))
        self._op = op
        self.once: Callable[[], object] = getattr(self, f"_{op}")

    def wrong(self) -> int:
        """How many items of the result are wrong, in one more round."""
        self._out.fill_(-1)
        if self._op in ("allreduce", "reduce"):
            self._out.copy_(self._in)
        self.once()
        wanted = self._expected()
        return 0 if wanted is None else int((self._out[: wanted.numel()] != wanted).sum())

    def _expected(self) -> torch.Tensor | None:
        world, pattern = self._world, self._pattern
        total = pattern * world + world * (world - 1) / 2
        everybody = torch.cat([pattern + rank for rank in range(world)])
        root = self._rank == 0
        known: dict[str, torch.Tensor | None] = {
            "allreduce": total,
            "broadcast": None if root else pattern,
            "allgather": everybody,
            "reduce_scatter": total,
            "reduce": total if root else None,
            "gather": everybody if root else None,
            "scatter": pattern,
            "alltoall": everybody,
            "sendrecv": pattern + (self._rank - 1) % world,
            "barrier": None,
        }
        return known[self._op]

    def _allreduce(self) -> None:
        dist.all_reduce(self._out)

    def _broadcast(self) -> None:
        dist.broadcast(self._in if self._rank == 0 else self._out, 0)

    def _allgather(self) -> None:
        all_gather_single(self._out, self._ins[0])

    def _reduce_scatter(self) -> None:
        reduce_scatter_single(self._outs[0], self._in)

    def _reduce(self) -> None:
        dist.reduce(self._out, 0)

    def _gather(self) -> None:
        dist.gather(self._ins[0], self._outs if self._rank == 0 else None)

    def _scatter(self) -> None:
        dist.scatter(self._outs[0], self._ins if self._rank == 0 else None)

    def _alltoall(self) -> None:
        dist.all_to_all_single(self._out, self._in)

    def _sendrecv(self) -> None:
        sent = dist.isend(self._in, (self._rank + 1) % self._world)
        dist.recv(self._out, (self._rank - 1) % self._world)
        assert sent is not None
        sent.wait()

    def _barrier(self) -> None:
        dist.barrier()


def agree_on_rounds(operation: GlooOperation, seconds: float) -> int:
    """As many as fit in the time, the same on all ranks."""
    each = sum(ranks.time_calls(operation.once, 3)) / 3
    rounds = torch.tensor([min(max(seconds / each, 5), MOST_ROUNDS)], dtype=torch.float64)
    dist.broadcast(rounds, 0)
    return int(rounds.item())


def measure_gloo(op: str, size: int, seconds: float) -> Row:
    operation = GlooOperation(op, size)
    for _ in range(3):
        operation.once()
    times = ranks.time_calls(operation.once, agree_on_rounds(operation, seconds))
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    wrong = torch.tensor([operation.wrong()])
    dist.all_reduce(wrong)
    return {
        "op": op,
        "bytes": operation.bytes,
        "seconds": report.summary(slowest.tolist()),
        "wrong": int(wrong.item()),
    }


def rank_main() -> None:
    store = ranks.connect_store()
    for command in ranks.commands():
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=store,
                rank=command["rank"],
                world_size=command["world"],
                timeout=timedelta(seconds=LIMIT_S),
            )
        rows = [
            measure_gloo(op, size, command["seconds"])
            for op in command["ops"]
            for size in ([0] if op == "barrier" else command["sizes"])
        ]
        ranks.reply("measured", rows=rows)
    dist.destroy_process_group()


# ---- in the launcher ----


class Sources:
    """What measures one round of each library. A context manager: gloo's ranks end with it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._pool = ranks.Pool(__file__)
        self._processes: list[ranks.RankProcess] = []
        self._sources: dict[str, Callable[[], list[Row]]] = {}
        for name in arguments.rivals.split(","):
            self._add(name, folder)

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.__exit__(None, None, None)

    def measure(self) -> dict[str, list[Row]]:
        """One round of all, in the order of the arguments."""
        return {name: source() for name, source in self._sources.items()}

    def _add(self, name: str, folder: Path) -> None:
        if name == "gloo":
            self._processes = self._pool.start(self._arguments.world)
            self._sources[name] = self._gloo
        elif name in mpi.NAMES:
            library = mpi.find(name)
            if library is None:
                print(f"{name}: skipped, not installed")
                return
            built = library.build(folder)
            words = library.command(built, self._arguments.world, self._mpi_words())
            self._sources[name] = lambda: self._native(words)
        else:
            found = native.program("ft_bench" if name == "ft" else "shm_limit")
            words = [str(found), *self._native_words()]
            self._sources[name] = lambda: self._native(words)

    def _gloo(self) -> list[Row]:
        a = self._arguments
        for rank, process in enumerate(self._processes):
            told = {"ops": a.ops, "sizes": a.sizes, "seconds": a.seconds}
            process.send("run", rank=rank, world=a.world, **told)
        rows: list[Row] = self._pool.gather(self._processes, "measured", LIMIT_S)[0]["rows"]
        return rows

    def _native(self, command: list[str]) -> list[Row]:
        rows: list[Row] = native.run(command, LIMIT_S)[1]["results"]
        return rows

    def _native_words(self) -> list[str]:
        a = self._arguments
        given = {"world": a.world, "op": ",".join(a.ops), "min": a.min, "max": a.max}
        given |= {"factor": a.factor, "seconds": a.seconds}
        return [word for name, each in given.items() for word in (f"--{name}", str(each))]

    def _mpi_words(self) -> list[str]:
        a = self._arguments
        return [",".join(a.ops), str(a.min), str(a.max), str(a.factor), str(a.seconds)]


def pooled(summaries: list[dict[str, float]]) -> dict[str, float]:
    """Several rounds of one time as one."""
    return {
        "count": sum(each["count"] for each in summaries),
        "median": statistics.median(each["median"] for each in summaries),
        "p99": statistics.median(each["p99"] for each in summaries),
        "min": min(each["min"] for each in summaries),
        "max": max(each["max"] for each in summaries),
    }


def collect(rounds: list[dict[str, list[Row]]], world: int) -> list[Row]:
    """A row for each operation and size, with the times of all who measured it."""
    found: dict[Key, dict[str, list[dict[str, float]]]] = {}
    for measured in rounds:
        for name, rows in measured.items():
            for row in rows:
                if row["wrong"]:
                    raise RuntimeError(f"{name}: {row['op']}: {row['wrong']} wrong results")
                times = found.setdefault((row["op"], row["bytes"]), {})
                times.setdefault(name, []).append(row["seconds"])
    results = []
    for (op, size), times in found.items():
        seconds = {name: pooled(each) for name, each in times.items()}
        own = seconds.get("ft", {"median": 0.0})["median"]
        ratios = {
            name: own / each["median"]
            for name, each in seconds.items()
            if name != "ft" and each["median"] > 0
        }
        results.append(
            {"op": op, "world": world, "bytes": size, "seconds": seconds, "ft_share_of": ratios}
        )
    return results


def draw(results: list[Row], path: Path) -> None:
    """A panel for each operation: medians by size, a line for each library."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ops = [op for op in dict.fromkeys(row["op"] for row in results) if op != "barrier"]
    columns = min(3, len(ops))
    lines = -(-len(ops) // columns)
    figure, panels = pyplot.subplots(
        lines, columns, figsize=(3.4 * columns, 2.8 * lines), layout="constrained", squeeze=False
    )
    for number, op in enumerate(ops):
        axes = panels[number // columns][number % columns]
        rows = [row for row in results if row["op"] == op]
        for colour, name in enumerate(NAMES):
            points = [
                (row["bytes"], row["seconds"][name]["median"] * 1e6)
                for row in rows
                if name in row["seconds"]
            ]
            if points:
                style = "--" if name == "limit" else "o-"
                axes.plot(*zip(*points, strict=True), style, ms=3, color=f"C{colour}", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(op, fontsize=10)
        axes.grid(alpha=0.3)
    for number in range(len(ops), lines * columns):
        panels[number // columns][number % columns].set_axis_off()
    panels[0][0].legend(fontsize=8)
    figure.supxlabel("bytes", fontsize=9)
    figure.supylabel("us, medians", fontsize=9)
    figure.suptitle(f"{results[0]['world']} ranks on one host", fontsize=11)
    figure.savefig(path, dpi=110)
    print(f"written: {path}")


def parse_arguments() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="two sizes, one round, 2 ranks")
    parser.add_argument("--world", type=int, help="default 4")
    parser.add_argument("--ops", default=",".join(OPS), help="default: all")
    parser.add_argument("--rivals", default=",".join(NAMES), help="default %(default)s")
    parser.add_argument("--min", type=report.parse_bytes, default=4, help="default 4")
    parser.add_argument("--max", type=report.parse_bytes, help="default 16M")
    parser.add_argument("--factor", type=report.parse_bytes, help="between two sizes; default 8")
    parser.add_argument("--seconds", type=float, help="for each size and library; default 0.2")
    parser.add_argument("--rounds", type=int, help="default 3")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it there (PNG or SVG)")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.world = arguments.world or (2 if quick else 4)
    arguments.max = arguments.max or (2**16 if quick else 2**24)
    arguments.factor = arguments.factor or (2**14 if quick else 8)
    arguments.seconds = arguments.seconds or (0.005 if quick else 0.2)
    arguments.rounds = arguments.rounds or (1 if quick else 3)
    arguments.ops = arguments.ops.split(",")
    unknown = (set(arguments.ops) - set(OPS)) | (set(arguments.rivals.split(",")) - set(NAMES))
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    arguments.sizes = [arguments.min]
    while arguments.sizes[-1] * arguments.factor <= arguments.max:
        arguments.sizes.append(arguments.sizes[-1] * arguments.factor)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.rank_process:
        rank_main()
        return 0
    run = report.describe_run(arguments)
    rounds = []
    with tempfile.TemporaryDirectory() as folder, Sources(arguments, Path(folder)) as sources:
        for number in range(arguments.rounds):
            ranks.progress(f"round {number + 1} of {arguments.rounds}")
            rounds.append(sources.measure())
    results = collect(rounds, arguments.world)
    report.print_machine(run)
    report.print_shares(results, NAMES)
    report.write_json(arguments.json, {"benchmark": "rivals", **run, "results": results})
    if arguments.picture is not None:
        draw(results, arguments.picture)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except native.NotBuilt as error:
        sys.exit(str(error))
