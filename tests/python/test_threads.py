"""Threads of a process do not grow with its groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rankside import leave_default_group
from tasks import thread_names

GROUPS = 6


def store_threads() -> int:
    return len([name for name in thread_names().values() if name.startswith("ft-store")])


def store_threads_by_groups(kind: str, where: str) -> list[int]:
    """Before the first group, after it, and after the last."""
    leave_default_group()
    store = dist.FileStore(where, 1) if kind == "file" else dist.HashStore()
    found = [store_threads()]  # of stores before: these may end meanwhile
    dist.init_process_group("ft", store=store, rank=0, world_size=1)
    found.append(store_threads())
    for _ in range(GROUPS):
        dist.all_reduce(torch.ones(3), group=dist.new_group([0]))
    found.append(store_threads())
    leave_default_group()
    return found


@pytest.mark.parametrize("kind", ("file", "hash"))
def test_groups_over_one_store_share_its_thread(ranks, tmp_path, kind):
    before, first, last = ranks.world(1).on(
        0, store_threads_by_groups, kind, str(tmp_path / "store")
    )
    assert 1 <= first <= before + 1 and last <= first, (before, first, last)
