"""MPI libraries as rivals: which are installed, and benchmarks/rivals/mpi_bench.c run over them.

Debian's packages: openmpi-bin libopenmpi-dev; mpich libmpich-dev. Both may be installed.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "rivals" / "mpi_bench.c"
NAMES = ("openmpi", "mpich")
# What mpirun needs: root is refused else, and more ranks than cores too.
_EXTRA = {"openmpi": ("--allow-run-as-root", "--oversubscribe"), "mpich": ()}


@dataclass(frozen=True)
class Library:
    """One that is installed: its compiler, and what starts its ranks."""

    name: str
    compiler: str
    launcher: str

    def build(self, folder: Path) -> Path:
        """Compile the program there. Raises subprocess.CalledProcessError."""
        target = folder / f"mpi_bench.{self.name}"
        command = [self.compiler, "-O2", "-std=c99", "-o", str(target), str(SOURCE)]
        subprocess.run(command, check=True, timeout=120)
        return target

    def command(self, built: Path, world: int, words: list[str]) -> list[str]:
        return [self.launcher, *_EXTRA[self.name], "-np", str(world), str(built), *words]


def find(name: str) -> Library | None:
    """The library by Debian's names for several, which stand side by side; None: not installed."""
    compiler, launcher = shutil.which(f"mpicc.{name}"), shutil.which(f"mpirun.{name}")
    return Library(name, compiler, launcher) if compiler and launcher else None
