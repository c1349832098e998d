"""What tests of groups with child processes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from process_group_side import LIMIT, place
from rankside import wait_until

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
