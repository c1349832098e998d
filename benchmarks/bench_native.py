"""The native benchmarks' programs: where they were built, and what they print."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_BUILD = Path(os.environ.get("TORCHFT_EXT_BUILD_ROOT", ROOT / "build"))
Message = dict[str, Any]


class NotBuilt(RuntimeError):
    """A native program is not there."""


def program(name: str) -> Path:
    """Where it is. Raises NotBuilt, which says how to build it."""
    found = _BUILD / "dev" / "benchmarks" / "native" / name
    if not found.exists():
        raise NotBuilt(f"{name} has not been built: make bench-native, or scripts/build.sh --tests")
    return found


def run_for_json(command: list[str], limit_s: float) -> Message:
    """Run a program that prints JSON alone. Raises as run()."""
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=limit_s)
    if done.returncode != 0:
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}")
    message: Message = json.loads(done.stdout)
    return message


def run(command: list[str], limit_s: float) -> tuple[list[str], Message]:
    """Run a program whose last line is JSON. Returns the lines before it, and the JSON.

    Raises RuntimeError where it fails, and subprocess.TimeoutExpired.
    """
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=limit_s)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}")
    message: Message = json.loads(lines[-1])
    return lines[:-1], message
