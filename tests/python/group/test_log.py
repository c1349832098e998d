"""The log goes through torch's levels: one line for each generation and each failure, or
silence."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import IO

GENERATIONS_AND_A_FAILURE = """
from datetime import timedelta
import torch, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("ft", store=store, rank=0, world_size=1)
import torchft_ext
backend = torchft_ext.backend()
address = f"127.0.0.1:{store.port}"
backend.configure(address + "/second", 0, 1)
dist.all_reduce(torch.ones(3))
try:
    backend.configure(address + "/third", 0, 2, timeout=timedelta(seconds=1))
except torchft_ext.CommTimeoutError:
    backend.configure(address + "/fourth", 0, 1)
dist.destroy_process_group()
"""


ABORT = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("ft", store=store, rank=0, world_size=1)
import torchft_ext
torchft_ext.backend().abort("it was too slow")
"""


# Of a store call that takes longer than a second, as calls do where the machine stalls.
STALLED = "thread ft-store is left to itself"


def lines_at(
    level: str | None, env: dict[str, str], program: str = GENERATIONS_AND_A_FAILURE
) -> list[str]:
    """Our lines on stderr at torch's log level, but for stalls; None: the default."""
    chosen = {name: value for name, value in env.items() if name != "TORCH_CPP_LOG_LEVEL"}
    if level is not None:
        chosen["TORCH_CPP_LOG_LEVEL"] = level
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=chosen,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return ours(done.stderr)


def ours(error: str) -> list[str]:
    lines = error.splitlines()
    return [line for line in lines if "torchft_ext" in line and STALLED not in line]


def test_each_generation_and_each_failure_is_one_line_at_level_info(rank_env):
    lines = lines_at("INFO", rank_env)
    assert len([line for line in lines if "of 1 ranks begins" in line]) == 3, lines
    assert len([line for line in lines if "configure on" in line]) == 1, lines
    assert len(lines) == 4, lines


def test_at_the_default_level_only_the_failure_is_told(rank_env):
    (line,) = lines_at(None, rank_env)
    assert "configure on" in line and "W" in line.split()[0]


def test_abort_is_told_at_level_info_alone(rank_env):
    assert lines_at(None, rank_env, ABORT) == []
    begins, line = lines_at("INFO", rank_env, ABORT)
    assert "of 1 ranks begins" in begins
    assert "it was too slow" in line and "[I" in line


def test_nothing_is_told_below_its_level(rank_env):
    assert lines_at("ERROR", rank_env) == []


CHILDREN = """
import os, signal, time
from concurrent.futures import ThreadPoolExecutor
import torch, torch.distributed as dist
from torchft_ext import CommError
from torchft_ext import process_group as pgs

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
groups = [pgs.ProcessGroupBabyHost(timeout=60.0) for _ in range(2)]
pool = ThreadPoolExecutor(2)

def form(name):
    place = f"127.0.0.1:{store.port}/{name}"
    for call in [pool.submit(groups[rank].configure, place, rank, 2) for rank in range(2)]:
        call.result()

def end_of(group):
    try:
        group.allreduce([torch.ones(1)]).wait()
    except CommError as error:
        return error
    raise AssertionError("it stands")
"""
BUSY_CHILD_IS_REPLACED = """
form("both")
groups[0].allreduce([torch.ones(1)])
groups[0].configure(f"127.0.0.1:{store.port}/alone", 0, 1)
end_of(groups[1])
form("again")
groups[0].allreduce([torch.ones(1)])
groups[0].shutdown()
end_of(groups[1])
"""
CHILD_IS_KILLED = """
form("both")
os.kill(groups[0].child_pid(), signal.SIGKILL)
while groups[0].errored() is None or groups[1].errored() is None:
    time.sleep(0.01)
"""


def test_end_of_a_child_is_a_warning_only_where_nobody_asked_for_it(rank_env):
    assert lines_at(None, rank_env, CHILDREN + BUSY_CHILD_IS_REPLACED) == []
    (line,) = lines_at(None, rank_env, CHILDREN + CHILD_IS_KILLED)
    assert "its child process" in line and "was ended by SIGKILL" in line


TWO_RANKS = """
import sys
import torch, torch.distributed as dist
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
if rank == 0:
    print(store.port, flush=True)
dist.init_process_group("ft", store=store, rank=rank, world_size=2)
import time, torchft_ext
while torchft_ext.backend().stats()["monitor"]["connections"] < 2:
    time.sleep(0.01)
print("ready", flush=True)
sys.stdin.readline()
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor.tolist() == [2, 2, 2]
dist.destroy_process_group()
"""


def start_rank(rank: int, port: int, env: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", TWO_RANKS, str(rank), str(port)]
    return subprocess.Popen(command, env=env, text=True, stdin=pipe, stdout=pipe, stderr=pipe)


def expect_line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    line = rank.stdout.readline().strip()
    assert line, rank.communicate(timeout=10)[1]
    return line


SILENT = "has not been heard of"


def read_what_is_there(stream: IO[str] | None) -> str:
    assert stream is not None
    there = select.select([stream], [], [], 0)[0]
    return os.read(stream.fileno(), 65536).decode() if there else ""


def warnings_while_stopped(rank: subprocess.Popen[str], other: subprocess.Popen[str]) -> list[str]:
    """What the rank says of the other one's silence, which is shorter than the limit."""
    read_what_is_there(rank.stderr)  # of a slow start
    told, limit = "", time.monotonic() + 3
    os.kill(other.pid, signal.SIGSTOP)
    while SILENT not in told and time.monotonic() < limit:
        time.sleep(0.02)
        told += read_what_is_there(rank.stderr)
    time.sleep(0.3)  # for a second one
    told += read_what_is_there(rank.stderr)
    os.kill(other.pid, signal.SIGCONT)
    return [line for line in told.splitlines() if SILENT in line]


def test_loss_of_a_peer_is_one_line_at_the_default_level(rank_env):
    ranks: list[subprocess.Popen[str]] = []
    try:
        ranks.append(start_rank(0, 0, rank_env))
        ranks.append(start_rank(1, int(expect_line(ranks[0])), rank_env))
        assert [expect_line(rank) for rank in ranks] == ["ready", "ready"]
        ranks[1].kill()
        error = ranks[0].communicate("go\n", timeout=60)[1]  # its allreduce raises
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    warnings = [line for line in ours(error) if "[W" in line]
    told = [line for line in warnings if SILENT not in line]  # that of a slow start is none
    assert len(told) == 1, error
    assert f"pid {ranks[1].pid}" in told[0]


def warnings_of_a_silent_member(env: dict[str, str]) -> list[str]:
    """Rank 0's of rank 1, which is stopped for more than a second and is a member afterwards."""
    ranks: list[subprocess.Popen[str]] = []
    try:
        ranks.append(start_rank(0, 0, env))
        ranks.append(start_rank(1, int(expect_line(ranks[0])), env))
        assert [expect_line(rank) for rank in ranks] == ["ready", "ready"]
        warnings = warnings_while_stopped(*ranks)
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    for line in warnings:
        assert f"rank 1 (host {os.uname().nodename}, pid {ranks[1].pid})" in line
        assert "[W" in line, line
        assert "counts as lost after 5 s" in line, line
    return warnings


def test_peer_that_is_silent_for_a_second_is_warned_of_once_and_is_still_a_member(rank_env):
    env = {k: v for k, v in rank_env.items() if k != "TORCHFT_EXT_HEARTBEAT"}
    for _ in range(3):  # a machine that stalls makes another silence
        warnings = warnings_of_a_silent_member(env)
        if len(warnings) == 1:
            break
    assert len(warnings) == 1, warnings
