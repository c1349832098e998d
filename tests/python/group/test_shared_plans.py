"""The table of plans of collectives in shared memory: printed, read, counted, compared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, World, values_of
from rankside import ErrorInfo, backend, failure_of, join, seconds

VARIABLE = "TORCHFT_EXT_SHARED_MEMORY_PLANS"
PATIENCE = 60.0
ONE_SYNCHRONISATION = """
allreduce any any 64 line
allreduce 2-8 any 100K once
allreduce any any any slices
"""


def printed(plans: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if plans is not None:
        environment[VARIABLE] = str(plans)
    command = [sys.executable, "-m", "torchft_ext.plans"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=environment
    )


def test_printed_table_is_one_that_the_variable_reads(tmp_path: Path):
    built_in = printed()
    assert built_in.returncode == 0, built_in.stderr
    assert "allreduce" in built_in.stdout and "alltoall" in built_in.stdout
    path = tmp_path / "plans.txt"
    path.write_text(built_in.stdout)
    assert printed(path).stdout == built_in.stdout
    path.write_text(ONE_SYNCHRONISATION)
    own = printed(path).stdout
    assert "2-8" in own and "100K" in own and own != built_in.stdout
    path.write_text(own)
    assert printed(path).stdout == own


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("allreduce any any 1K once\n", "allreduce: expected a row of 'any' size for 2 ranks"),
        ("\nallreduce any any 1K ring\n", "line 2: expected a plan: 'line', 'once', 'slices'"),
        (None, "expected a file that can be read, found"),
    ],
)
def test_bad_table_is_refused_with_the_line_and_the_reason(
    tmp_path: Path, text: str | None, problem: str
):
    path = tmp_path / "plans.txt"
    if text is not None:
        path.write_text(text)
    refused = printed(path)
    assert refused.returncode == 2 and not refused.stdout
    assert VARIABLE in refused.stderr and problem in refused.stderr, refused.stderr


def counters() -> dict[str, int]:
    return backend().stats()["counters"]


def sums_by_plan(address: str, rank: int, size: int, plans: str) -> tuple[dict[str, int], int]:
    """How many of three sums each plan ran, and the digest, with the table of that file."""
    begin_with(address, rank, size, plans)
    before = counters()
    for items in (1, 100, 20_000):
        tensor = torch.full((items,), float(rank + 1))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((items,), float(size * (size + 1) // 2)))
    after = counters()
    ran = {name: after[f"shared_{name}"] - before[f"shared_{name}"] for name in PLANS}
    return ran, after["shared_plans"]


PLANS = ("line", "once", "slices", "chunks")


def begin_with(address: str, rank: int, size: int, plans: str) -> None:
    # A time that no other test has makes a group of its own, which reads the variable.
    os.environ[VARIABLE] = plans
    try:
        own_time = seconds(1.0 + sum(map(ord, plans)) / 1e6)
        join(address, rank, size, ask_after=own_time, local_sockets=True)
    finally:
        del os.environ[VARIABLE]


def why_over_sockets(address: str, rank: int, **options: object) -> str | None:
    join(address, rank, 2, **options)
    return backend().stats()["why_over_sockets"]


@pytest.mark.parametrize(
    ("local_sockets", "reasons"),
    [
        ((True, True), [None, None]),
        ((True, False), ["rank 1 has turned off", "this rank has turned off"]),
        ((False, False), ["this rank has turned off", "rank 0 has turned off"]),
    ],
)
def test_stats_say_why_collectives_run_over_sockets(ranks: Pool, local_sockets, reasons):
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    calls = [
        world.start(rank, why_over_sockets, address, rank, local_sockets=local_sockets[rank])
        for rank in range(2)
    ]
    for why, expected in zip(values_of(calls), reasons, strict=True):
        assert why is None if expected is None else why.startswith(expected), why


def digest_of(table: str) -> int:
    return int(table.splitlines()[0].rsplit(" ", 1)[1])


def test_table_decides_how_sums_run_and_stats_tell(ranks: Pool, tmp_path: Path):
    path = tmp_path / "own.txt"
    path.write_text(ONE_SYNCHRONISATION)
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    calls = [world.start(rank, sums_by_plan, address, rank, 2, str(path)) for rank in range(2)]
    for ran, digest in values_of(calls):
        assert ran == {"line": 1, "once": 2, "slices": 0, "chunks": 0}
        assert digest == digest_of(printed(path).stdout)


def begin_apart(address: str, rank: int, size: int, plans: str) -> ErrorInfo | None:
    return failure_of(lambda: begin_with(address, rank, size, plans))


def test_members_with_other_plans_are_a_mismatch_that_says_where_they_differ(
    ranks: Pool, tmp_path: Path
):
    paths = [tmp_path / f"plans_{rank}.txt" for rank in range(2)]
    paths[0].write_text(ONE_SYNCHRONISATION)
    paths[1].write_text("# those that are built in\n")
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    calls = [
        world.start(rank, begin_apart, address, rank, 2, str(paths[rank])) for rank in range(2)
    ]
    for error in values_of(calls):
        assert error is not None and error.type == "MismatchError", error
        assert "plans of collectives in shared memory differ for allreduce;" in error.text
        for rank, path in enumerate(paths):
            assert f"digest {digest_of(printed(path).stdout)} on ranks {rank}" in error.text
