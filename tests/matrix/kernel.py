"""Ends that the kernel gives: out of memory in a cgroup, and a core that takes long to write."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from matrix import cores
from matrix.cases import HANG, Pool, expect_cause, expect_exact_sums, expect_kind
from matrix.lateness import Releases, Strike
from matrix.process import MatrixError, RankProcess, SkippedError, monotonic_ns
from matrix.strikes import DEATH, LOST

ROOM = 32 * 2**20  # bytes that the victim may still take
CORE_MIB = 1024
ELEMENTS = 100_000
WORLDS = (2, 4, 8)
STRIKES_HERE = ("oom", "big_core")


@dataclass(frozen=True)
class KernelCase:
    """A cell of the matrix: the last rank ends so, in the midst of an operation."""

    operation: str
    world: int
    strike: str  # "oom" or "big_core"

    def __str__(self) -> str:
        """As printed in reports, and accepted on the command line."""
        return f"{self.operation}/{self.world}/{self.world - 1}/{self.strike}"


def run_kernel_case(pool: Pool, case: KernelCase) -> float:
    """Run it; the seconds from the strike to the last survivor's release.

    Raises:
        MatrixError: something went otherwise than it must; ranks may be in any state.
        SkippedError: this machine cannot do that.
    """
    return {"oom": _out_of_memory, "big_core": _big_core}[case.strike](pool, case)


def _begin(pool: Pool, case: KernelCase) -> tuple[RankProcess, list[RankProcess]]:
    ranks = pool.take(case.world)
    pool.configure(ranks)
    for rank in ranks:
        rank.say(f"loop {case.operation} {ELEMENTS}")
    return ranks[-1], ranks[:-1]


def _collect(ranks: list[RankProcess], struck: Strike, limit: float) -> tuple[float, str]:
    """The last release, and what one of them was told: that the last of these ranks is lost."""
    releases, text = Releases(struck), ""
    for rank in ranks[:-1]:
        event = rank.expect("failed", HANG)
        expect_kind(event, LOST)
        expect_cause(event, len(ranks) - 1, ranks)
        releases.add(rank, event)
        text = event["text"]
    return releases.expect_within(limit, text), text


# ---- out of memory ----


def _memory_group() -> Path:
    """Where a cgroup with a memory limit can be made: below our own (v1), or at the root (v2)."""
    root = Path("/sys/fs/cgroup")
    if (root / "memory").is_dir():
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                return root / "memory" / path.lstrip("/")
    if "memory" in _read(root / "cgroup.subtree_control").split():
        return root
    raise SkippedError("no cgroup with a memory controller can be made under /sys/fs/cgroup")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@contextmanager
def _limited(pid: int) -> Iterator[Path]:
    """The process in a cgroup of its own that lets it take little more memory."""
    group = _memory_group() / f"torchft_ext_matrix_{pid}"
    try:
        group.mkdir()
    except OSError as error:
        raise SkippedError(f"no cgroup can be made at {group}: {error.strerror}") from None
    try:
        limit = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / limit).write_text(str(ROOM))
        (group / "cgroup.procs").write_text(str(pid))
        yield group
    except OSError as error:
        raise SkippedError(f"{group} cannot be used: {error.strerror}") from None
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    until = time.monotonic() + HANG
    while True:
        try:
            group.rmdir()
            return
        except OSError:  # busy until its last process has been collected
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _kills(group: Path) -> int:
    """How often the kernel has killed in it for want of memory."""
    events = _read(group / "memory.events") or _read(group / "memory.oom_control")
    counts = dict(line.split() for line in events.splitlines())
    return int(counts.get("oom_kill", "0"))


def _await_kill(group: Path, survivors: list[RankProcess]) -> Strike:
    """The kernel reclaims what it can before it kills, which may take a second."""
    until = time.monotonic() + HANG
    while _kills(group) == 0:
        if time.monotonic() > until:
            raise MatrixError("the kernel does not kill for want of memory")
        time.sleep(0.0005)
    at = monotonic_ns()
    return Strike(at, Strike.now(survivors).waits)


def _out_of_memory(pool: Pool, case: KernelCase) -> float:
    _memory_group()
    victim, survivors = _begin(pool, case)
    with _limited(victim.pid) as group:
        victim.say("die oom")
        struck = _await_kill(group, survivors)
        released, text = _collect([*survivors, victim], struck, DEATH * pool.scale)
        if "its process ended" not in text:
            raise MatrixError(f"its heartbeats told, not its end: {text}")
        cores.await_end(victim)
        if _kills(group) != 1:
            raise MatrixError("the victim ended, but not for want of memory")
        victim.end()
    expect_exact_sums(pool, survivors)
    return released


# ---- a long core ----


def _big_core(pool: Pool, case: KernelCase) -> float:
    """While a core is written nothing is closed: the heartbeat limit tells, and the error says why."""
    if pool.scale > 1:
        raise SkippedError("a core of that size takes seconds: at scale 1 alone")
    if reason := cores.why_none(CORE_MIB * 2**20):
        raise SkippedError(reason)
    victim, survivors = _begin(pool, case)
    victim.say(f"ballast {CORE_MIB}")
    victim.expect("holding", HANG)
    struck = Strike.now(survivors)
    victim.say("die abort")
    released, text = _collect(
        [*survivors, victim], struck, pool.heartbeat(case.world) + DEATH * pool.scale
    )
    dumping = victim.alive()
    cores.await_end(victim)
    if (size := cores.written(victim)) < CORE_MIB * 2**20:
        raise MatrixError(f"the core has {size} bytes: it held nobody up")
    if dumping and "dumping core" not in text:
        raise MatrixError(f"the error does not say that a core is written: {text}")
    victim.end()
    expect_exact_sums(pool, survivors)
    return released
