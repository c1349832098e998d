"""Groups of this package for programs that say "gloo"."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import torchft_ext_autoload
from torchft_ext import _C, _backends

__all__ = ["backends_of", "replace_gloo"]


class Replacement:
    """Groups that are asked for with "gloo" are of this package, from now on, or within a block.

    Groups that were made stay what they are. Threads: one at a time.
    """

    def __init__(self) -> None:
        """Begin; see replace_gloo()."""
        self._was_there = torchft_ext_autoload.replaces_gloo(c10d)
        torchft_ext_autoload.replace_gloo(c10d)

    def __enter__(self) -> Replacement:
        """Return the same object."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let "gloo" mean what it meant before."""
        if not self._was_there:
            torchft_ext_autoload.restore_gloo(c10d)


def replace_gloo() -> AbstractContextManager[object]:
    """Make groups of this package where a program asks for "gloo"; does not block.

        torchft_ext.replace_gloo()  # before groups are made
        dist.init_process_group("gloo")

        with torchft_ext.replace_gloo():
            group = dist.new_group(backend="gloo")

    The environment variable TORCHFT_EXT_REPLACE_GLOO=1 does the same at ``import torch``, in
    processes that the program starts too. It holds for ``init_process_group`` and ``new_group``
    with "gloo" and with specs such as "cpu:gloo,cuda:nccl", for DeviceMesh, and for calls of
    ``ProcessGroupGloo(...)``. ``dist.get_backend()`` and ``isinstance(..., ProcessGroupGloo)``
    still say gloo; backends_of() tells the truth. Names that a program imported from torch before
    stay torch's, and so do 'ft:gloo' and the classes of torchft_ext.process_group over gloo.

    Returns:
        A context manager, for programs that want it for a time.

    Threads: one at a time. Source: torch's ProcessGroupGloo.
    """
    return Replacement()


def backends_of(group: dist.ProcessGroup | None = None) -> tuple[_C.Backend, ...]:
    """Return this package's backends in a group; none where it has others only. Does not block.

    Args:
        group: None: the default group.

    Raises:
        ValueError: there is no default group.
    """
    return tuple(_backends.backends_of(c10d._get_default_group() if group is None else group))
