"""After how long a process that does not answer is lost: default, environment, option."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rankside import connected_store, seconds, wait_until
from test_generations import configure

pytestmark = pytest.mark.alone

RANK = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import torchft_ext

rank, port, seconds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
options = torchft_ext.Options(heartbeat=timedelta(seconds=float(seconds))) if seconds else None
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
if rank == 0:
    print(store.port, flush=True)
dist.init_process_group("ft", store=store, rank=rank, world_size=2, pg_options=options)
while torchft_ext.backend().stats()["monitor"]["connections"] < 2:
    time.sleep(0.01)
dist.all_reduce(torch.ones(1))
print("ready", flush=True)
sys.stdin.readline()
tensor = torch.ones(3)
try:
    dist.all_reduce(tensor)
    print("sum", tensor.tolist(), flush=True)
except torchft_ext.CommError as error:
    print(type(error).__name__, error, flush=True)
sys.stdin.readline()
os._exit(0)
"""
Rank = subprocess.Popen[str]


def line_of(rank: Rank) -> str:
    assert rank.stdout is not None
    line = rank.stdout.readline().strip()
    assert line, rank.communicate(timeout=10)[1]
    return line


def go_on(rank: Rank) -> None:
    assert rank.stdin is not None
    rank.stdin.write("\n")
    rank.stdin.flush()


@contextmanager
def two_ranks(env: dict[str, str], limit: str | None, option: str) -> Iterator[tuple[Rank, Rank]]:
    """Both in a generation, their liveness connections up; limit: of the environment, option: of
    Options."""
    own = {name: value for name, value in env.items() if name != "TORCHFT_EXT_HEARTBEAT"}
    if limit is not None:
        own["TORCHFT_EXT_HEARTBEAT"] = limit
    pipe = subprocess.PIPE
    ranks: list[Rank] = []
    port = "0"
    try:
        for rank in ("0", "1"):
            command = [sys.executable, "-c", RANK, rank, port, option]
            ranks.append(
                subprocess.Popen(command, env=own, text=True, stdin=pipe, stdout=pipe, stderr=pipe)
            )
            if rank == "0":
                port = line_of(ranks[0])
        assert [line_of(rank) for rank in ranks] == ["ready", "ready"]
        yield ranks[0], ranks[1]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("limit", "option", "holds"),
    [(None, "", 5.0), ("2.5", "", 2.5), ("30", "2.5", 2.5)],
    ids=["default", "environment", "option"],
)
def test_stopped_process_is_lost_after_the_limit(rank_env, limit, option, holds):
    with two_ranks(rank_env, limit, option) as (survivor, stopped):
        os.kill(stopped.pid, signal.SIGSTOP)
        go_on(survivor)
        told = line_of(survivor)
    assert told.startswith("PeerLostError ") and f"pid {stopped.pid}" in told
    assert "state T: stopped by a signal" in told
    silence = re.search(r"has not answered for ([\d.]+) s", told)
    assert silence is not None, told
    assert holds <= float(silence[1]), told
    assert holds == 5.0 or float(silence[1]) < 5.0, told  # the default


def test_without_a_limit_nobody_is_lost_for_being_stopped(rank_env):
    with two_ranks(rank_env, "0.2", "0") as (waiting, stopped):
        os.kill(stopped.pid, signal.SIGSTOP)
        go_on(waiting)
        assert waiting.stdout is not None
        assert select.select([waiting.stdout], [], [], 2.0)[0] == [], line_of(waiting)
        os.kill(stopped.pid, signal.SIGCONT)
        go_on(stopped)
        assert [line_of(rank) for rank in (waiting, stopped)] == ["sum [2.0, 2.0, 2.0]"] * 2


def wait_for_the_record_of_rank_0(address: str) -> None:
    store = connected_store(address)
    wait_until(lambda: store.check(["0"]), "rank 0 in the store")


def test_process_that_was_stopped_in_configure_is_told_so(ranks):
    world, address = ranks.world(2, heartbeat=seconds(2)), ranks.address()
    call = world.start(0, configure, address, 0, 2, 6.0)  # nobody else comes
    world.on(1, wait_for_the_record_of_rank_0, address)
    world.freeze(0)
    time.sleep(2.5)
    world.thaw(0)
    error = call.error("CommTimeoutError")
    stood_still = re.search(r"this process itself did not run for ([\d.]+) s meanwhile", error.text)
    assert stood_still and float(stood_still[1]) >= 2.5, error.text
