"""What a rank process is short of, and what it then does: run inside the rank."""

from __future__ import annotations

import gc
import os
import resource

import torch
import torch.distributed as dist
from rankside import connected_store, kept, leave_default_group, seconds

GROUP_LIMIT = 20.0  # seconds; far beyond when a shortage must be told
NOBODY = 65534
MOST_GROUPS = 50
_limits: list[tuple[int, tuple[int, int]]] = []  # as they were
_held: list[int] = []


def _lower(which: int, soft: int) -> None:
    _limits.append((which, resource.getrlimit(which)))
    resource.setrlimit(which, (soft, resource.getrlimit(which)[1]))


def leave_descriptors(count: int) -> int:
    """Let this process open so many more, and no others; its limit from now on."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    _held.append(os.dup(0))
    while _held[-1] <= highest:  # fills what is free below
        _held.append(os.dup(0))
    limit = _held[-1] + 1 + count
    _lower(resource.RLIMIT_NOFILE, limit)
    return limit


def leave_no_threads() -> None:
    """Root has no limit of threads: become somebody else for a while."""
    gc.collect()  # groups of earlier tests, in cycles, have threads that this one would share
    if os.getuid() == 0:
        os.setresuid(NOBODY, NOBODY, 0)
    _lower(resource.RLIMIT_NPROC, 1)


def leave_memory(bytes_left: int) -> None:
    pages = int(open("/proc/self/statm").read().split()[0])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + bytes_left)


def leave_small_files(longest: int) -> None:
    _lower(resource.RLIMIT_FSIZE, longest)


def use_shared_memory(allowed: bool) -> None:
    """Of groups that are made from now on."""
    if allowed:
        del os.environ["TORCHFT_EXT_SHARED_MEMORY"]
    else:
        os.environ["TORCHFT_EXT_SHARED_MEMORY"] = "0"


def make_baby() -> None:
    from torchft_ext.process_group import ProcessGroupBabyHost

    ProcessGroupBabyHost(timeout=GROUP_LIMIT).shutdown()


def end_shortage() -> None:
    which, limits = _limits.pop()
    if os.getresuid()[2] == 0:
        os.setresuid(0, 0, 0)
    resource.setrlimit(which, limits)
    while _held:
        os.close(_held.pop())


def make_group(**options: object) -> None:
    import torchft_ext

    settings = torchft_ext.Options(**options) if options else None
    limit = seconds(GROUP_LIMIT)
    group = dist.new_group(backend="ft", timeout=limit, pg_options=settings)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == dist.get_world_size()


def make_groups() -> None:
    """More than a process has descriptors for: some that groups before had are free again."""
    for _ in range(MOST_GROUPS):
        make_group()


def make_default_group(address: str, rank: int, size: int) -> None:
    leave_default_group()
    store = connected_store(address)
    limit = seconds(GROUP_LIMIT)
    dist.init_process_group("ft", store=store, rank=rank, world_size=size, timeout=limit)


def allocate(elements: int) -> None:
    kept["tensor"] = torch.ones(elements)


def reduce_what_is_allocated() -> None:
    dist.reduce(kept["tensor"], dst=0)


def reduce_it_in_a_callback() -> None:
    """Multiplied in a copy, which is made when the collective begins."""
    works: list[dist.Work] = []
    op = dist._make_nccl_premul_sum(2.0)
    first = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    first.then(lambda _: works.append(dist.reduce(kept["tensor"], 0, op, async_op=True))).wait()
    works[0].wait()
