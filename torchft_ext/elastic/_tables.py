"""torch.distributed's tables, after the default group has begun a generation in a new view."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from torchft_ext import _C, _groups


def follow(group: dist.ProcessGroup, backends: list[_C.Backend], store: Store) -> None:
    """Make new_group() and what else asks the tables work among the members of the view.

    The default group's store becomes that of the view, since the one before may be dead; and the
    number by which the next group is named becomes the same on all members. Blocks for one small
    collective of the default group.
    """
    for backend in backends:
        _groups.follow_generation(backend)
    world = c10d._world
    if group is not c10d.GroupMember.WORLD:
        return
    name, _ = world.pg_map[group]
    world.pg_map[group] = (name, store)
    highest = torch.tensor([world.group_count], dtype=torch.int64)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    world.group_count = int(highest.item())
