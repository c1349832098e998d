"""A group that needs no init_process_group()."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchft_ext import _C
from torchft_ext._group_made import group_made
from torchft_ext_names import ENGINES, names_of

_BACKENDS = ("ft", *(name for engine in ENGINES for name in names_of(engine)))
_number = itertools.count()


def make_group(
    store: Store,
    rank: int,
    world_size: int,
    *,
    backend: str = "ft",
    name: str | None = None,
    timeout: timedelta | None = None,
    options: _C.Options | None = None,
    device_id: torch.device | None = None,
) -> dist.ProcessGroup:
    """Make a process group without init_process_group(), independent of the default group.

    Blocks, without the GIL, until all members have joined, up to the timeout.

    The result is a ProcessGroup of torch's with all of its methods. It can be passed as `group=` to
    the collectives of torch.distributed and as the process group of DDP.
    `torchft_ext.backend(group)` returns its backend. It is not in torch's tables. So call rank()
    and size() on the group itself, and name roots and peers with `group_src=` and `group_dst=`.
    Code that looks into torch's tables refuses such a group: Join, ZeroRedundancyOptimizer,
    torch.distributed.monitored_barrier() and functional collectives (for these,
    torchft_ext.process_group has groups).

    Call shutdown() when the group is no longer needed: a group that is merely deleted does not say
    goodbye to the others.

    Args:
        store: the store in which the members meet. Their keys are prefixed with the group's name.
        rank: the rank of this process, from 0 to `world_size` - 1.
        world_size: the number of members, 1 or more.
        backend: "ft", "ft:host" or "ft:nccl".
        name: the name of the group, equal on all members. If None, a number is used that this
            process counts up. Give a name if members make their groups in different orders, if a
            member may be restarted, or if threads of one process are ranks. A process that makes
            the group can meet members that call configure() at the same moment, if their address
            is "host:port/" + the store's prefix + name.
        timeout: the limit of operations, and of this call. If None, that of `options` is used, or
            else 30 minutes.
        options: the options of the group.
        device_id: the device to bind the group to. Its communicator is made immediately.

    Returns:
        The group. It serves every type of device that the backend serves.

    Raises:
        CommError: If the group could not be formed. Nothing is left of it.
        ValueError, TypeError: If an argument is bad.
        NotImplementedError: If there is no such engine or none for this process's devices, or with
            TORCHFT_EXT_DISABLE=1.

    Threads: any; threads of one process may be ranks, with a group each. Source: the constructors
    of torch's own backends (ProcessGroupGloo).
    """
    return made_group(
        store,
        rank,
        world_size,
        backend=backend,
        name=name,
        timeout=timeout,
        options=options,
        device_id=device_id,
    )


def made_group(
    store: Store,
    rank: int,
    world_size: int,
    *,
    backend: str,
    name: str | None,
    timeout: timedelta | None,
    options: _C.Options | None,
    device_id: torch.device | None = None,
    beside: tuple[_C.Backend, list[int]] | None = None,
    by_rule: bool = False,
) -> dist.ProcessGroup:
    """As make_group().

    Args:
        store, rank, world_size, backend, name, timeout, options, device_id: as there.
        beside: another group, and the members' ranks in it: so a death is known before it is
            noticed in this one.
        by_rule: whether an elastic job makes another group of this kind in each view.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"make_group: backend: expected one of {_BACKENDS}, found {backend!r}")
    if store is None:
        raise ValueError("make_group: store: expected a store, found None")
    if os.environ.get("TORCHFT_EXT_DISABLE", "") == "1":
        raise NotImplementedError(
            "make_group: TORCHFT_EXT_DISABLE=1 leaves no group of this package; make one of torch's"
        )
    device = None if device_id is None else torch.device(device_id)
    chosen = f"group{next(_number)}" if name is None else name
    made = _C._make_group(
        dist.PrefixStore(chosen, store),
        rank,
        world_size,
        timeout=timeout,
        engine=backend[3:] or "ft",
        name=chosen,
        options=options,
        bound_device=None if device is None else str(device),
        beside=None if beside is None else beside[0],
        ranks_beside=[] if beside is None else beside[1],
        by_rule=by_rule,
    )
    try:
        if device is not None:
            made.bound_device_id = device
        group_made()
    except BaseException:  # Ctrl-C; a traceback may keep it
        made.abort()
        raise
    return made
