"""Threads and descriptors of a process do not grow with its groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rankside import leave_default_group

import torchft_ext

GROUPS = 6


def threads_by_groups(kind: str, where: str) -> list[list[str]]:
    """Names of the library's threads after the first group, and after the last."""
    leave_default_group()
    store = dist.FileStore(where, 1) if kind == "file" else dist.HashStore()
    dist.init_process_group("ft", store=store, rank=0, world_size=1)
    found = []
    for _ in range(GROUPS):
        group = dist.new_group([0])
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        found.append(sorted(torchft_ext.backend(group).stats()["threads"]))
    leave_default_group()
    return [found[0], found[-1]]


@pytest.mark.parametrize("kind", ("file", "hash"))
def test_groups_over_one_store_share_its_thread(ranks, tmp_path, kind):
    world = ranks.world(1)
    first, last = world.on(0, threads_by_groups, kind, str(tmp_path / "store"))
    assert last == first
    assert len([name for name in last if name.startswith("ft-store")]) <= 2, last
