#!/usr/bin/env python3
"""What device tensors cost: ft beside torch's own "nccl", in the same run.

launch     CPU time of one allreduce call, and time until its result is there, by size; pairs of
           turns in random order, and the ratio pair by pair, as in allreduce.py. One rank, and two,
           which share the GPU where there is only one.
abort      from the call of abort() with operations under way to an idle stream.
configure  a first and later generations, up to the first checked sum, beside destroy + init of
           "nccl".
memory     that one more group takes on the device.

--device privateuseone runs it on the simulated device, without a rival or with ft as its own: that
shows that it runs and measures nothing; but with NCCL's own library there (tests/nccl_host), what
its host code costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import bench_gpu_results as figures
import bench_pairs as paired
import bench_ranks as ranks
import bench_report as report
import torch
import torch.distributed as dist

DEFAULT_SIZES = {1: "4,1K,32K,256K,1M,16M,64M,256M", 2: "4,1K,32K,256K,1M,16M,256M"}
QUICK_SIZES = "4,1M"
PARTS = ("launch", "abort", "configure", "memory")
LIMIT = timedelta(seconds=120)
GPU_TESTS = Path(__file__).resolve().parents[1] / "tests" / "gpu"


def accelerator() -> ModuleType:
    """What tests and benchmarks know of the device (tests/gpu/accelerator.py)."""
    if str(GPU_TESTS) not in sys.path:
        sys.path.append(str(GPU_TESTS))
    import accelerator

    return accelerator


# ---- in a rank


def names() -> tuple[str, ...]:
    """Ours, and the rival where there is one."""
    rival = os.environ["BENCH_RIVAL"]
    return ("ft",) if rival == "none" else ("ft", rival)


def backend_of(name: str) -> str:
    """Of the next group; sets the kind of its communicators."""
    if name != "ft2":
        return name
    os.environ["TORCHFT_EXT_NCCL_BLOCKING"] = "0"
    return "ft"


def new_group(name: str) -> dist.ProcessGroup:
    asked = os.environ.get("TORCHFT_EXT_NCCL_BLOCKING")
    group: dist.ProcessGroup = dist.new_group(backend=backend_of(name), timeout=LIMIT)
    os.environ.pop("TORCHFT_EXT_NCCL_BLOCKING", None)
    if asked is not None:
        os.environ["TORCHFT_EXT_NCCL_BLOCKING"] = asked
    return group


def use_device(rank: int) -> None:
    """Make the device's context, which is nobody's cost."""
    import torchft_ext  # noqa: F401

    accelerator().prepare()
    torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    torch.ones(1, device=accelerator().device()).add_(1)
    torch.accelerator.synchronize()


def init(command: dict[str, Any], store: dist.Store, backend: str = "ft") -> None:
    rank, world = command["rank"], command["world"]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=LIMIT)


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(max(1, size // 4), device=accelerator().device())


def sum_is_right(group: dist.ProcessGroup | None = None) -> None:
    """One checked sum, complete on the device."""
    tensor = torch.full((8,), dist.get_rank() + 1.0, device=accelerator().device())
    dist.all_reduce(tensor, group=group)
    world = dist.get_world_size()
    if tensor.cpu().tolist() != [world * (world + 1) / 2] * 8:
        raise RuntimeError(f"wrong sum: {tensor}")


def block_length(size: int) -> int:
    """Operations per turn."""
    return 20 if size <= 256 * 2**10 else 6 if size <= 16 * 2**20 else 2


def launch_turn(group: dist.ProcessGroup, tensor: torch.Tensor, count: int) -> dict[str, Any]:
    """Calls one after the other; then as many, each awaited on the host."""
    dist.barrier(device_ids=None)  # of the default group: between the processes, not on the device
    dist.all_reduce(tensor, group=group)
    torch.accelerator.synchronize()
    call, works = [], []
    for _ in range(count):
        begin = time.perf_counter()
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
        call.append(time.perf_counter() - begin)
    for work in works:
        work.wait()
    torch.accelerator.synchronize()
    done = []
    for _ in range(count):
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        torch.accelerator.synchronize()
        done.append(time.perf_counter() - begin)
    return {"call": call, "done": done}


def rank_launch(command: dict[str, Any], store: dist.Store) -> None:
    if not dist.is_initialized():
        use_device(command["rank"])
        init(command, store)
        assert dist.group.WORLD is not None
        groups["ft"] = dist.group.WORLD
        for name in names()[1:]:
            groups[name] = new_group(name)
        for group in groups.values():
            sum_is_right(group)
    tensor, count = zeros(command["size"]), block_length(command["size"])

    def turn(name: str) -> dict[str, Any]:
        return launch_turn(groups[name], tensor, count)

    turns = paired.take_turns(names(), command["pairs"], command["seed"], turn)
    ranks.reply("measured", turns=turns)


groups: dict[str, dist.ProcessGroup] = {}


def rank_abort(command: dict[str, Any], store: dist.Store) -> None:
    """Rank 0 has operations under way that rank 1 never joins, aborts, and waits for its stream."""
    import torchft_ext

    use_device(command["rank"])
    init(command, dist.PrefixStore("abort", store))
    backend, times = torchft_ext.backend(), []
    for number in range(command["count"] + 1):
        sum_is_right()
        dist.barrier()
        if command["rank"] == 0:
            times.append(abort_once(backend, command["pending"]))
        else:
            while backend.errored() is None:
                time.sleep(0.001)
            torch.accelerator.synchronize()
        address = f"{command['address']}/abort{number}"
        backend.configure(address, command["rank"], command["world"], timeout=LIMIT)
    ranks.reply("measured", times=times[1:])  # the first makes what all later ones have


def abort_once(backend: Any, pending: int) -> dict[str, float]:
    tensor = zeros(4096)
    for _ in range(pending):
        dist.all_reduce(tensor, async_op=True).wait()
    after = torch.ones(1, device=accelerator().device()).add_(1)
    begin = time.perf_counter()
    backend.abort("the benchmark")
    returned = time.perf_counter() - begin
    torch.accelerator.synchronize()
    freed = time.perf_counter() - begin
    if after.item() != 2:
        raise RuntimeError("the next kernel did not run")
    return {"abort() returned": returned, "stream free": freed}


def rank_configure(command: dict[str, Any], store: dist.Store) -> None:
    """Generations, each up to its first checked sum; the first, by init_process_group(), is
    cold."""
    engine, rank, world = command["engine"], command["rank"], command["world"]
    use_device(rank)
    begin = time.perf_counter()
    init(command, dist.PrefixStore(f"{engine}/first", store), backend_of(engine))
    sum_is_right()
    cold, warm = time.perf_counter() - begin, []
    for number in range(command["count"]):
        dist.barrier()
        time.sleep(0.02)  # the barrier's last bytes are read before the connections go
        begin = time.perf_counter()
        if engine == "ft":
            import torchft_ext

            address = f"{command['address']}/configure{number}"
            torchft_ext.backend().configure(address, rank, world, timeout=LIMIT)
        else:
            dist.destroy_process_group()
            init(command, dist.PrefixStore(f"{engine}/{number}", store), backend_of(engine))
        sum_is_right()
        warm.append(time.perf_counter() - begin)
    ranks.reply("measured", cold=cold, warm=warm)


def rank_memory(command: dict[str, Any], store: dist.Store) -> None:
    use_device(command["rank"])
    init(command, dist.PrefixStore("memory", store))
    sum_is_right()  # what the first group of a process takes besides is not the next one's
    taken: dict[str, list[int]] = {}
    for name in names():
        made = []
        for _ in range(command["count"] + 1):
            before = accelerator().device_bytes()
            made.append(new_group(name))
            sum_is_right(made[-1])
            taken.setdefault(name, []).append(accelerator().device_bytes() - before)
        taken[name] = taken[name][1:]
    ranks.reply("measured", taken=taken)


def rank_main() -> None:
    store = ranks.connect_store()
    parts = {
        "launch": rank_launch,
        "abort": rank_abort,
        "configure": rank_configure,
        "memory": rank_memory,
    }
    for command in ranks.commands():
        parts[command["cmd"]](command, store)
    dist.destroy_process_group()


# ---- in the launcher


class Bench:
    """The launcher's side of every part."""

    def __init__(self, arguments: argparse.Namespace, save: Callable[[], None]) -> None:
        """save: called whenever `results` has more in it."""
        self.arguments = arguments
        self.results: dict[str, Any] = {}
        self._save = save

    def run(self, part: str) -> None:
        found = self.results[part] = []
        for result in getattr(self, part)():
            found.append(result)
            self._save()

    def ask(
        self, world: int, part: str, limit_s: float = 300, **fields: object
    ) -> list[dict[str, Any]]:
        """Run one part in fresh processes; the answers, by rank."""
        with self.pool(world) as pool:
            processes = pool.start(world)
            self.send(pool, processes, part, **fields)
            answers = pool.gather(processes, "measured", limit_s)
            pool.finish(processes)
        return answers

    def pool(self, world: int) -> ranks.Pool:
        return ranks.Pool(__file__, accelerator().environment(shared=world > 1))

    @staticmethod
    def send(pool: ranks.Pool, processes: list[Any], part: str, **fields: object) -> None:
        for rank, process in enumerate(processes):
            placed = {"rank": rank, "world": len(processes), "address": pool.address}
            process.send(part, **placed, **fields)

    # Each part returns rows of its table, and what goes into the JSON.

    def launch(self) -> Iterator[dict[str, Any]]:
        for world in self.arguments.worlds:
            with self.pool(world) as pool:
                processes = pool.start(world)
                for size in self.sizes(world):
                    yield self.launch_size(pool, processes, size)
                pool.finish(processes)

    def sizes(self, world: int) -> list[int]:
        if self.arguments.sizes:
            chosen: list[int] = self.arguments.sizes
            return chosen
        default = QUICK_SIZES if self.arguments.quick else DEFAULT_SIZES[min(world, 2)]
        return report.comma_list(report.parse_bytes)(default)

    def launch_size(self, pool: ranks.Pool, processes: list[Any], size: int) -> dict[str, Any]:
        turns: dict[str, dict[str, list[list[float]]]] = {
            metric: {name: [] for name in names()} for metric in figures.METRICS
        }
        world = len(processes)

        def round_of(taken: int) -> tuple[dict[str, Any], int, float]:
            ranks.progress(f"launch, world {world}: {report.format_bytes(size)}, {taken} pairs")
            seed, pairs = self.arguments.seed + taken, self.arguments.pairs
            self.send(pool, processes, "launch", size=size, pairs=pairs, seed=seed)
            answers = pool.gather(processes, "measured", 300)
            for metric, by_name in turns.items():
                for name, more in by_name.items():
                    by_rank = [[t[metric] for t in answer["turns"][name]] for answer in answers]
                    more.extend(paired.slowest_rank(by_rank))
            result = self.evaluate(turns, world, size)
            widths = [ratio["relative_width"] for ratio in result["ratio_to_rival"].values()]
            return result, result["pairs"], max(widths, default=float("inf"))

        return paired.repeat_until_narrow(round_of, self.arguments, self.arguments.seconds)

    def evaluate(
        self, turns: dict[str, dict[str, list[list[float]]]], world: int, size: int
    ) -> dict[str, Any]:
        return {
            "world": world,
            "ranks_share_a_device": accelerator().shared_by(world),
            "bytes": size,
            "pairs": len(turns["call"]["ft"]),
            "operations_per_turn": block_length(size),
            "seconds": {
                metric: {
                    name: report.summary([t for turn in taken for t in turn])
                    for name, taken in by_name.items()
                }
                for metric, by_name in turns.items()
            },
            "ratio_to_rival": {
                metric: paired.compare(by_name["ft"], by_name[rival], self.arguments.seed)
                for metric, by_name in turns.items()
                for rival in names()[1:]
            },
        }

    def abort(self) -> Iterator[dict[str, Any]]:
        for pending in (1, 32):
            ranks.progress(f"abort with {pending} operations under way")
            answers = self.ask(2, "abort", pending=pending, count=self.arguments.aborts)
            times = answers[0]["times"]
            measured = {name: report.summary([t[name] for t in times]) for name in times[0]}
            yield {"operations_under_way": pending, "seconds": measured}

    def configure(self) -> Iterator[dict[str, Any]]:
        """Each library in processes of its own, in alternate rounds; the slowest rank counts."""
        for world in self.arguments.worlds:
            cold: dict[str, list[float]] = {name: [] for name in names()}
            warm: dict[str, list[float]] = {name: [] for name in names()}
            for number in range(self.arguments.rounds):
                for engine in names():
                    ranks.progress(f"configure, world {world}: {engine}, round {number + 1}")
                    count = self.arguments.generations
                    answers = self.ask(world, "configure", engine=engine, count=count)
                    cold[engine].append(max(a["cold"] for a in answers))
                    by_generation = zip(*(a["warm"] for a in answers), strict=True)
                    warm[engine] += [max(times) for times in by_generation]
            for engine in names():
                summaries = {
                    "cold": report.summary(cold[engine]),
                    "warm": report.summary(warm[engine]),
                }
                yield {"engine": engine, "world": world, "seconds": summaries}

    def memory(self) -> list[dict[str, Any]]:
        ranks.progress("memory of a group")
        taken = self.ask(1, "memory", count=4)[0]["taken"]
        return [
            {"engine": name, "bytes_per_group": statistics.median(found), "bytes": found}
            for name, found in taken.items()
        ]


def parse_arguments() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="two sizes, 5 pairs, few generations")
    device = os.environ.get("TORCHFT_EXT_TEST_DEVICE", "cuda")
    parser.add_argument("--device", default=device, choices=("cuda", "privateuseone"))
    parser.add_argument(
        "--rival",
        choices=("nccl", "ft2", "none"),
        help="ft2: ft once more, with non-blocking communicators, which must give ratios of 1 "
        "with --non-blocking; default nccl, none where simulated",
    )
    parser.add_argument(
        "--non-blocking",
        action="store_true",
        help="ft with non-blocking communicators (TORCHFT_EXT_NCCL_BLOCKING=0)",
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"default {','.join(PARTS)}")
    parser.add_argument("--worlds", type=report.comma_list(int), default=[1, 2], help="default 1,2")
    sizes = report.comma_list(report.parse_bytes)
    parser.add_argument("--sizes", type=sizes, help=f"in bytes, with K, M, G; {DEFAULT_SIZES}")
    parser.add_argument("--seconds", type=float, help="per size at most; default 15")
    parser.add_argument("--aborts", type=int, help="default 20")
    parser.add_argument("--generations", type=int, help="per round; default 20")
    parser.add_argument("--rounds", type=int, help="of each library; default 3")
    paired.add_arguments(parser, pairs=30, most=1200)
    arguments = parser.parse_args()
    paired.fill_in(arguments, pairs=30, most=1200)
    defaults = {"seconds": (5.0, 15.0), "aborts": (3, 20), "generations": (3, 20), "rounds": (1, 3)}
    for name, (quick, usual) in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, quick if arguments.quick else usual)
    if arguments.rival is None:
        arguments.rival = "nccl" if arguments.device == "cuda" else "none"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("this torch sees no CUDA device; --device privateuseone is the simulated one")
    arguments.parts = arguments.parts.split(",")
    for part in arguments.parts:
        if part not in PARTS:
            parser.error(f"--parts: expected some of {', '.join(PARTS)}; found {part!r}")
    return arguments


def describe(arguments: argparse.Namespace) -> dict[str, Any]:
    run = report.describe_run(arguments)
    run["measurement"] = not accelerator().simulated()
    run["nccl"] = "NCCL's own host code" if accelerator().NCCL_HOST else "as the device"
    if run["measurement"]:
        import machine  # tests/gpu/machine.py

        run["machine"].update(machine.cuda())
    return run


def main() -> int:
    if ranks.RANK_FLAG in sys.argv:
        rank_main()
        return 0
    arguments = parse_arguments()
    os.environ["TORCHFT_EXT_TEST_DEVICE"] = arguments.device  # of the ranks too
    os.environ["BENCH_RIVAL"] = arguments.rival
    if arguments.non_blocking:
        os.environ["TORCHFT_EXT_NCCL_BLOCKING"] = "0"
    run = describe(arguments)

    def reached() -> dict[str, str]:
        return figures.aims(bench.results) if run["measurement"] else {}

    def save() -> None:
        data = {"benchmark": "gpu", **run, "results": bench.results, "aims": reached()}
        report.write_json(arguments.json, data)

    bench = Bench(arguments, save)
    for part in arguments.parts:
        bench.run(part)
    report.print_machine(run)
    for part, found in bench.results.items():
        figures.print_part(part, found, rival=arguments.rival, simulated=accelerator().simulated())
        print()
    for aim, verdict in reached().items():
        print(f"{verdict}: {aim}")
    if not run["measurement"]:
        print(
            "Simulated device with NCCL's own library: its host code is measured, and no kernel, "
            "copy or context."
            if accelerator().NCCL_HOST
            else "Simulated device: this shows that the benchmark runs. It measures nothing."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
