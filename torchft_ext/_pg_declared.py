"""What a program declares of c10d backends, for groups over them (`_pg_backend.py`).

Owner: the process; a declaration is for its life. Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

import torchft_ext_names
from torchft_ext_names import gloo

Make = Callable[[Store, int, int, timedelta], Any]


@dataclass(frozen=True)
class BackendCapabilities:
    """The properties of a c10d backend, which a program declares for ProcessGroupBackend.

    Attributes:
        make: a function that makes the backend from a store, a rank, a world size and a timeout. It
            blocks until all members have joined, and returns a c10d Backend or ProcessGroup. If
            None, the function that was passed to torch.distributed.Backend.register_backend() is
            used.
        renewable: whether any number of backends can be made, one after the other, each with its
            own store, rank and size. If not, there are no generations.
        quiet_after_abort: whether the backend touches no tensor after its abort() has returned. If
            not, operations run on copies of inputs and outputs.
    """

    make: Make | None = None
    renewable: bool = True
    quiet_after_abort: bool = False


def _make_gloo(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    return gloo(c10d)(store, rank, world_size, timeout)


_declared: dict[str, BackendCapabilities] = {
    "gloo": BackendCapabilities(make=_make_gloo),
    "mpi": BackendCapabilities(renewable=False),
}


def declare_backend(name: str, capabilities: BackendCapabilities) -> None:
    """Declare the properties of a backend, so that ProcessGroupBackend(name) can use it.

    init_process_group("ft:<name>") then makes such a group, too.

    Args:
        name: the name, as in torch.distributed.Backend.register_backend().
        capabilities: the properties. If they are wrong, the program may hang, or tensors may be
            written after an abort.

    Raises:
        ValueError: If the backend was declared with other properties before.
    """
    known = _declared.setdefault(name.lower(), capabilities)
    if known != capabilities:
        raise ValueError(f"declare_backend: '{name}': expected what was declared before, {known}")
    torchft_ext_names.add(name.lower())


def capabilities_of(name: str) -> BackendCapabilities:
    known = _declared.get(name.lower())
    if known is None:
        raise ValueError(
            f"ProcessGroupBackend: expected a declared backend, one of {sorted(_declared)}, found "
            f"'{name}': call declare_backend('{name}', BackendCapabilities(...))"
        )
    if not known.renewable:
        raise NotImplementedError(
            f"ProcessGroupBackend: '{name}' cannot be made anew from a store, a rank and a size: "
            "its members are those that its launcher started; use ProcessGroupHost"
        )
    return known


def registered(name: str) -> Make:
    """Return what makes a backend that was registered with torch."""
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None or plugin.extended_api:
        raise ValueError(
            f"ProcessGroupBackend: '{name}': expected BackendCapabilities.make, or a backend that "
            "register_backend() was told of without extended_api"
        )
    make: Make = plugin.creator_fn
    return make
