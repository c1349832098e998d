#!/usr/bin/env python3
"""Run all benchmarks that need no GPU, those in Python and the native one.

    python benchmarks/run.py [--quick] [--json DIRECTORY] [NAME...]

With --json each writes DIRECTORY/NAME.json: benchmarks/compare.py compares two such directories.
The native one runs where it has been built (make bench-native does that).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parent / "build" / "dev" / "benchmarks" / "native" / "ft_bench"
IN_PYTHON = (
    "allreduce",
    "configure",
    "recovery",
    "agree",
    "sync",
    "import_cost",
    "idle",
    "ddp_step",
)


def run_in_python(name: str, quick: bool, folder: Path | None) -> int:
    """Run one benchmark. Returns its exit status."""
    command = [sys.executable, str(HERE / f"{name}.py")]
    if quick:
        command.append("--quick")
    if folder is not None:
        command.append(f"--json={folder / name}.json")
    return subprocess.run(command, check=False).returncode


def run_native(quick: bool, folder: Path | None) -> int:
    """Run ft_bench, whose last line is its JSON. Returns its exit status."""
    if not NATIVE.exists():
        print("ft_bench has not been built: make bench-native", flush=True)
        return 0
    command = [str(NATIVE), "--op", "all", "--world", "2" if quick else "4"]
    command += ["--max", "64K", "--factor", "64", "--seconds", "0.01"] if quick else []
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    *table, last = done.stdout.splitlines() or [""]
    print("\n".join(table), flush=True)
    if folder is not None and done.returncode == 0:
        (folder / "ft_bench.json").write_text(json.dumps(json.loads(last), indent=1) + "\n")
    return done.returncode


def main() -> int:
    """Run those that the arguments name, or all."""
    names = (*IN_PYTHON, "ft_bench")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="each as briefly as it can be")
    parser.add_argument("--json", type=Path, metavar="DIRECTORY")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(names)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if arguments.json is not None:
        arguments.json.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.names or names:
        print(f"== {name}", flush=True)
        if name == "ft_bench":
            status = run_native(arguments.quick, arguments.json)
        else:
            status = run_in_python(name, arguments.quick, arguments.json)
        if status != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
