#!/usr/bin/env python3
"""Run all benchmarks that need no GPU, those in Python and the native ones.

    python benchmarks/run.py [--quick] [--json DIRECTORY] [--pictures DIRECTORY] [NAME...]

With --json each writes DIRECTORY/NAME.json: benchmarks/compare.py compares two such directories.
With --pictures the documentation's pictures are drawn there, from what was measured in this run.
Native programs have to be built: scripts/build.sh --tests does, and make bench-native.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Benchmark:
    """One script: what makes it as brief as it can be, and the pictures that it draws."""

    brief: tuple[str, ...] = ()  # beside --quick
    pictures: tuple[tuple[str, str], ...] = ()  # option, file name


BENCHMARKS = {
    "allreduce": Benchmark(("--worlds=2", "--sizes=4,256K")),
    "configure": Benchmark(("--worlds=2",)),
    "recovery": Benchmark(
        ("--world=2", "--kills=1", "--resident=0", "--scenarios=running,elastic,spare,frozen,gloo"),
        (("picture", "recovery.png"), ("phases-picture", "recovery_phases.png")),
    ),
    "agree": Benchmark(("--world=2",)),
    "sync": Benchmark(("--newcomers=1", "--size=8M", "--count=3")),
    "divergence": Benchmark(("--steps=3",)),
    "import_cost": Benchmark(("--processes=1",)),
    "idle": Benchmark(),
    "backend_call": Benchmark(),
    "ddp_step": Benchmark(("--steps=5",)),
    "reduce": Benchmark(),
    "ft_bench": Benchmark(),
    "rivals": Benchmark(("--ops=allreduce,alltoall,barrier",), (("picture", "rivals.png"),)),
}


def command_of(name: str, quick: bool, json: Path | None, pictures: Path | None) -> list[str]:
    """What runs one benchmark."""
    benchmark = BENCHMARKS[name]
    command = [sys.executable, str(HERE / f"{name}.py")]
    if quick:
        command += ["--quick", *benchmark.brief]
    if json is not None:
        command.append(f"--json={json / name}.json")
    if pictures is not None:
        command += [f"--{option}={pictures / file}" for option, file in benchmark.pictures]
    return command


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="each as briefly as it can be")
    parser.add_argument("--json", type=Path, metavar="DIRECTORY")
    parser.add_argument("--pictures", type=Path, metavar="DIRECTORY")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        named = ", ".join(sorted(unknown))
        parser.error(f"no benchmark {named}; there are {', '.join(BENCHMARKS)}")
    return arguments


def main() -> int:
    """Run those that the arguments name, or all. Exit status 1: one failed."""
    arguments = parse_arguments()
    for directory in (arguments.json, arguments.pictures):
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.names or BENCHMARKS:
        print(f"== {name}", flush=True)
        begun = time.monotonic()
        command = command_of(name, arguments.quick, arguments.json, arguments.pictures)
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
        print(f"   {time.monotonic() - begun:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
