"""Cores: whether this machine writes them where a test can look, and whether one was written."""

from __future__ import annotations

import resource
import time
from contextlib import suppress
from pathlib import Path

from matrix.process import MatrixError, RankProcess

PATIENCE = 60.0  # seconds; a core of a gibibyte takes a few


def why_none(size: int) -> str:
    """Why a core of so many bytes would not lie in its process's directory; empty: it would."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if pattern.startswith("|") or "/" in pattern:
        return f"cores go elsewhere: core_pattern is {pattern!r}"
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard != resource.RLIM_INFINITY and hard < size:
        return f"the hard limit of cores is {hard} bytes"
    return ""


def await_end(victim: RankProcess) -> None:
    """Until the process has ended, and its core is written."""
    until = time.monotonic() + PATIENCE
    while victim.alive():
        if time.monotonic() > until:
            raise MatrixError(
                f"the victim (pid {victim.pid}) does not end: {written(victim)} bytes of its core "
                f"are written; its threads: {threads_of(victim)}"
            )
        time.sleep(0.01)


def threads_of(victim: RankProcess) -> str:
    """What each of its threads is in: name, state, function of the kernel's."""
    found = []
    for task in Path(f"/proc/{victim.pid}/task").glob("*"):
        with suppress(OSError):  # it has ended meanwhile
            name = (task / "comm").read_text().strip()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            found.append(f"{name} {state} {(task / 'wchan').read_text()}")
    return "; ".join(found) or "none"


def written(victim: RankProcess) -> int:
    """Bytes of what it has left."""
    return sum(core.stat().st_size for core in Path(victim.directory).glob("core*"))


def expect_one(victim: RankProcess) -> None:
    """It left a core, where cores are kept."""
    await_end(victim)
    if not why_none(1) and written(victim) == 0:
        raise MatrixError("no core was written")
