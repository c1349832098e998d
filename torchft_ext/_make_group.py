"""A group that needs no init_process_group()."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchft_ext import _C, _interrupts
from torchft_ext_autoload import ENGINES, names_of

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
    """Make a process group of its own, beside torch's tables or without them.

    Blocks, without the GIL, until all members have come, up to the timeout. The result is torch's
    ProcessGroup, with all of its methods, and `group=` of torch.distributed's collectives and of
    DDP. `torchft_ext.backend(group)` is its handle. torch's tables do not know it: ask the group
    itself for rank() and size(), and name roots and peers by `group_src=` and `group_dst=`. What
    asks torch's tables refuses such a group: Join, ZeroRedundancyOptimizer, monitored_barrier() of
    torch.distributed, functional collectives (torchft_ext.process_group has groups for those). Call
    shutdown() on it when it is done: its end says no goodbye.

    Args:
        store: where the members meet. Its keys lie under the group's name.
        rank: this process's, 0 to `world_size` - 1.
        world_size: 1 or more.
        backend: "ft", "ft:host" or "ft:nccl".
        name: the group's, the same on all members; None: a number counted in this process, which
            fits where all members make their groups in one order and none is started again. Give
            one where threads of this process are ranks.
            Members that configure() meet a process that makes the group in the same moment at
            "host:port/" + the store's prefix + name.
        timeout: of operations, and of making the group; None: that of `options`, else 30 minutes.
        options: of this group.
        device_id: the device whose communicator is made at once.

    Returns:
        The group, for every type of device that the backend serves.

    Raises:
        CommError: the group could not be formed. Nothing is left of it.
        ValueError, TypeError: a bad argument.
        NotImplementedError: there is no such engine, or none for this process's devices, or
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
        _interrupts.watch()
    except BaseException:  # Ctrl-C; a traceback may keep it
        made.abort()
        raise
    return made
