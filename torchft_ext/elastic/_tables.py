"""torch.distributed's tables, after the default group has begun a generation in a new view."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from torchft_ext import _C, _groups

_MOST_GROUPS = 1 << 32  # that are made in one view, and before the first one


def follow(group: dist.ProcessGroup, backends: list[_C.Backend], store: Store, view: int) -> None:
    """Make new_group() and what else asks the tables work among the members of the view.

    The default group's store becomes that of the view, since the one before may be dead. The number
    by which the next group is named follows from the view's: so it is the same on all members, new
    on each of them, and nothing need be exchanged, which members of other languages would not do.
    Does not block.
    """
    for backend in backends:
        _groups.follow_generation(backend)
    world = c10d._world
    if group is not c10d.GroupMember.WORLD:
        return
    name, _ = world.pg_map[group]
    world.pg_map[group] = (name, store)
    world.group_count = view * _MOST_GROUPS
