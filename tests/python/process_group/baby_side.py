"""What tests of groups with child processes share."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from process_group_side import LIMIT, place
from ranks import Call, values_of
from rankside import kept, wait_until

from torchft_ext import process_group as pgs

HOST = "BabyHost"


@pytest.fixture
def baby(store: dist.TCPStore) -> Iterator[pgs.ProcessGroupBabyHost]:
    """A group of this process alone, with its child."""
    made = pgs.ProcessGroupBabyHost(timeout=LIMIT)
    made.configure(place(store), 0, 1)
    yield made
    made.shutdown()


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def await_gone(*pids: int) -> None:
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), f"the end of child {pid}")


def await_spare(group: pgs.ProcessGroupBaby) -> int:
    wait_until(group.spare_is_ready, "the spare")
    return group._children._spare.pid


def child_pid() -> int:
    return kept["group"].child_pid()


def times_of_a_kill(calls: list[Call], victim: int, pids: list[int]) -> list[float]:
    """Kill that rank's child; how long each of the calls, which return their failure first, took to
    be told of it."""
    killed = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    errors = [error for error, _ in values_of(calls)]
    words = f"rank {victim}: its child process {pids[victim]} was ended by SIGKILL"
    assert [(error.type, words in error.text) for error in errors] == [
        ("CommAbortedError", True)
    ] * len(calls)
    return [error.at - killed for error in errors]
