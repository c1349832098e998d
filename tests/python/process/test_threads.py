"""Threads of a process do not grow with its groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rankside import leave_default_group, wait_until
from tasks import thread_names

import torchft_ext

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


def shut_down_and_keep() -> None:
    store = dist.HashStore()
    group = torchft_ext.make_group(store, 0, 1, name="kept")
    before = store_threads()
    assert before >= 1
    group.shutdown()
    wait_until(lambda: store_threads() < before, "the end of the store's thread")
    assert group.size() == 1  # the object is there


def test_thread_of_a_store_ends_with_its_last_group_though_that_is_held(ranks):
    ranks.fresh(1).on(0, shut_down_and_keep)
