"""What an elastic job says of a view: one line of the log, and how long each part took."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch.distributed as dist

from torchft_ext.elastic._traceback import RankedTraceback

LIMIT = 100  # seconds
MEMBER = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
import torchft_ext
from torchft_ext import elastic
size = int(sys.argv[2])
job = elastic.join(sys.argv[1], size=size, min_size=1, limit=timedelta(seconds=1))
job.recover()
print("formed", flush=True)
try:
    while True:
        dist.all_reduce(torch.ones(1))
except torchft_ext.CommError:
    view = job.recover()
print(*view.phases, flush=True)
job.close()
"""


@pytest.fixture
def members(rank_env):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", MEMBER, f"127.0.0.1:{store.port}/log"]
    env = {**rank_env, "TORCH_CPP_LOG_LEVEL": "INFO"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    found = []

    def start(size: int) -> subprocess.Popen:
        found.append(subprocess.Popen([*command, str(size)], env=env, **pipes))
        return found[-1]

    start(2), start(2)
    yield found[:2], start
    for member in found:
        member.kill()
        member.communicate()


def test_who_was_started_with_another_size_is_told_so_at_once(members):
    founders, start = members
    for member in founders:
        assert member.stdout.readline() == "formed\n"
    late = start(3)
    lines = iter(late.stderr.readline, "")
    line = next(line for line in lines if "founded with" in line)
    assert "size=3 here, founded with 2; what it was founded with holds" in line, line


def test_each_view_is_one_line_that_says_who_decided_and_who_is_gone(members):
    founders, _ = members
    for member in founders:
        assert member.stdout.readline() == "formed\n"
    lost, survivor = founders
    lost.kill()
    told, log = survivor.communicate(timeout=LIMIT)
    assert told.split() == ["detect", "release", "agree", "connect", "tables"], log
    lines = [line for line in log.splitlines() if re.search("elastic job '[^']+': view", line)]
    assert len(lines) == 2, log
    took = r"\d[\d.e-]* s"
    assert re.search(
        rf"view 1: 2 members \(0 before\), this one is rank \d; of the founding; agree {took}; "
        rf"connect {took}; tables {took}$",
        lines[0],
    ), lines[0]
    name = r"[^;:]+, pid"
    assert re.search(
        rf"view 2: 1 members \(2 before\), this one is rank 0; without {name} {lost.pid} \(its "
        rf"process ended\); decided by 1 and the store: {name} {survivor.pid}; detect {took}; "
        rf"release {took}; agree {took}; connect {took}; tables {took}$",
        lines[1],
    ), lines[1]


RAISES = """
import sys
from torchft_ext import elastic
job = elastic.join(sys.argv[1], size=1)
if sys.argv[2] == "in a view":
    job.recover()
raise ValueError("wrong")
"""


@pytest.mark.parametrize(("when", "mark"), [("before", ""), ("in a view", "[rank0]: ")])
def test_traceback_has_a_rank_once_there_are_ranks(rank_env, when, mark):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", RAISES, f"127.0.0.1:{store.port}/raises", when]
    done = subprocess.run(command, env=rank_env, capture_output=True, text=True, timeout=LIMIT)
    assert f"\n{mark}ValueError: wrong\n" in f"\n{done.stderr}", done.stderr


def test_traceback_has_the_rank_of_the_newest_view(capsys, monkeypatch):
    def before(kind, error, traceback):
        print(f"{kind.__name__}: {error}\n", file=sys.stderr)

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # is put back
    hook = RankedTraceback.install(before)
    hook.rank = 3
    sys.excepthook(ValueError, ValueError("wrong"), None)
    assert capsys.readouterr().err == "[rank3]: ValueError: wrong\n\n"
    again = RankedTraceback.install(hook)  # the process has joined again
    sys.excepthook(ValueError, ValueError("wrong"), None)
    assert again is hook and capsys.readouterr().err == "ValueError: wrong\n\n"


LOSES_ITS_STORE = """
import os, signal, subprocess, sys, time
from datetime import timedelta
from torchft_ext import elastic
serve = [sys.executable, "-m", "torchft_ext.elastic", "--host", "127.0.0.1", "--port", "0"]
store = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
port = int(store.stdout.readline().split("port ")[1].split(";")[0])
job = elastic.join(f"127.0.0.1:{port}/lost", size=1, limit=timedelta(seconds=1))
job.recover()
time.sleep(1)  # what is said at the beginning is said
store.kill()
store.wait()
time.sleep(2)
job.agree(True)
"""


def test_store_that_is_lost_leaves_no_stack_trace_of_torchs(rank_env):
    """Members look at it again and again, and only what is under way at its end is told."""
    command = [sys.executable, "-c", LOSES_ITS_STORE]
    done = subprocess.run(command, env=rank_env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert "frame #" not in done.stderr and "TCPStore" not in done.stderr, done.stderr
