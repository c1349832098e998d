"""The tables of torch.distributed that hold ranks, kept in step with generations."""

from __future__ import annotations

from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.distributed import distributed_c10d as c10d

from torchft_ext import _C, _compiled, _ddp, _events
from torchft_ext._backends import backends_of

# What the generations before the last one knew, of groups and default groups of other libraries:
# group rank -> process, process -> global rank.
_foreign_members: WeakKeyDictionary[dist.ProcessGroup, dict[int, str]] = WeakKeyDictionary()
_foreign_ranks: WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = WeakKeyDictionary()

# Groups in torch's tables whose global ranks are their own: torchft_ext.process_group's.
numbered_by_themselves: WeakSet[dist.ProcessGroup] = WeakSet()


def backend(group: dist.ProcessGroup | None = None) -> _C.Backend:
    """Return the fault-tolerant backend of a group.

    A group of 'ft:gloo', of another declared backend or in a child process has an object with the
    same methods, except stats(), shrink(), options and those for devices. Does not block.

    Args:
        group: the process group. If None, the default group is used.

    Returns:
        The backend, on which configure(), abort(), check() and errored() can be called.

    Raises:
        ValueError: If the group has no backend of this package, or if there is no default group.
        TypeError: If `group` is not a process group.

    Threads: any.
    """
    if group is None:
        group = c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"torchft_ext.backend(): expected a process group or None, found {type(group).__name__}"
        )
    for found in backends_of(group):
        return found
    as_backend = getattr(group, "_as_backend", None)
    if callable(as_backend):
        return cast(_C.Backend, as_backend())
    raise ValueError(
        "torchft_ext.backend(): expected a group made with the backend 'ft', found backend "
        f"'{c10d._world.pg_backend_config.get(group, group.name())}'"
    )


def enter_numbered(group: dist.ProcessGroup, name: str) -> None:
    """Put a registered group into torch's tables, with ranks of its own: 0 to its size - 1."""
    named: Any = name  # a type of its own since torch 2.13
    numbered_by_themselves.add(group)
    c10d._world.pg_names[group] = named
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}


def leave_numbered(group: dist.ProcessGroup) -> None:
    """Undo enter_numbered()."""
    c10d._world.pg_names.pop(group, None)
    c10d._world.pg_group_ranks.pop(group, None)
    numbered_by_themselves.discard(group)


def adopt(name: str) -> dist.ProcessGroup:
    """Return a group that C++ code of this process has made and published.

    The group is entered into torch's tables, with global ranks of its own: 0 to its size - 1. Then
    the collectives of torch.distributed and the functional ones accept it. C++ still owns it, and
    ends it. Call this function again after each generation that C++ begins. Does not block.

    Args:
        name: the name that C++ passed to torchft_ext::publish().

    Returns:
        The group. `torchft_ext.backend(group)` returns its backend.

    Raises:
        ValueError: If no group of this package has that name.

    Threads: any. Source: torch's registry of process groups.
    """
    named: Any = name
    try:
        group = _c10d._resolve_process_group(named)
    except RuntimeError:  # torch's way to say that there is none
        group = None
    if group is None or not list(backends_of(group)):
        raise ValueError(f"adopt: name: expected one that C++ has published, found {name!r}")
    enter_numbered(group, name)
    return group


def follow_generation(changed: _C.Backend) -> None:
    """Bring torch's rank tables up to date after `changed` has begun a generation."""
    tables = c10d._world.pg_group_ranks
    for group in _own_groups():
        if any(found is changed for found in backends_of(group)):
            if group is c10d.GroupMember.WORLD:
                _follow_default_group(group, changed)
            else:
                tables[group] = _table_of(changed, tables[group])
    for group in list(numbered_by_themselves):
        if group in tables and any(found is changed for found in backends_of(group)):
            tables[group] = {rank: rank for rank in range(changed.size())}
    _ddp.follow_generation(changed)  # of groups that torch's tables do not know, too
    _compiled.follow_generation()
    _events.generation(changed.group_name, changed.generation, changed.rank(), changed.size())


def _own_groups() -> list[dist.ProcessGroup]:
    """Return the groups that this process is in.

    torch enters a number, not a group, where new_group() was called for others (NON_GROUP_MEMBER).
    """
    return [
        group
        for group in list(c10d._world.pg_group_ranks)  # at once: threads may be ranks
        if isinstance(group, dist.ProcessGroup) and group not in numbered_by_themselves
    ]


def _follow_default_group(group: dist.ProcessGroup, changed: _C.Backend) -> None:
    tables = c10d._world.pg_group_ranks
    tables[group] = {rank: rank for rank in range(changed.size())}
    for other in _own_groups():
        if other is group:
            continue
        own = next(backends_of(other), None)
        if own is None:
            tables[other] = _renumbered(other, tables[other], changed)
        else:
            tables[other] = _table_of(own, tables[other])


def _table_of(backend: _C.Backend, table: dict[int, int]) -> dict[int, int]:
    """Return global rank -> group rank for the members of a subgroup's generation; `table`: as it
    was.

    Who is not in the default group's generation has no global rank, and is entered under a negative
    number: asking for it by a rank is an error, and no wrong answer; ``group_src`` and
    ``group_dst`` work.
    """
    default = c10d._get_default_group()
    own = next(backends_of(default), None)
    if own is not None:
        numbers = _numbered(own._incarnations())
    else:  # another library's, whose ranks do not change
        before = dict(enumerate(backend._incarnations(before=True)))
        known = {before[rank]: number for number, rank in table.items() if rank in before}
        numbers = _foreign_ranks.setdefault(default, {})
        numbers.update({process: number for process, number in known.items() if number >= 0})
    members = enumerate(backend._incarnations())
    return {numbers.get(process, -1 - rank): rank for rank, process in members}


def _renumbered(
    group: dist.ProcessGroup, table: dict[int, int], default: _C.Backend
) -> dict[int, int]:
    """Return the table of a group of another library, after the default group's last change."""
    if group not in _foreign_members:  # it was made in the generation before
        before = dict(enumerate(default._incarnations(before=True)))
        _foreign_members[group] = {rank: before.get(old, "") for old, rank in table.items()}
    numbers = _numbered(default._incarnations())
    members = _foreign_members[group].items()
    return {numbers.get(process, -1 - rank): rank for rank, process in members}


def _numbered(processes: list[str]) -> dict[str, int]:
    return {process: rank for rank, process in enumerate(processes)}
