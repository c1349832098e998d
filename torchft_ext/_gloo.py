"""Groups of this package for programs that say "gloo"."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import torchft_ext_names
from torchft_ext import _C, _backends

__all__ = ["backends_of", "replace_gloo"]


class Replacement:
    """Makes "gloo" mean this package's groups, for good or within a `with` block.

    Existing groups do not change. Threads: one at a time.
    """

    def __init__(self) -> None:
        """Begin the replacement; see replace_gloo()."""
        self._was_there = torchft_ext_names.replaces_gloo(c10d)
        torchft_ext_names.replace_gloo(c10d)

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
            torchft_ext_names.restore_gloo(c10d)


def replace_gloo() -> AbstractContextManager[object]:
    """Make groups of this package whenever the program asks for "gloo".

    Does not block. Call it before groups are made, or use it as a context manager::

        torchft_ext.replace_gloo()
        dist.init_process_group("gloo")

        with torchft_ext.replace_gloo():
            group = dist.new_group(backend="gloo")

    The environment variable TORCHFT_EXT_REPLACE_GLOO=1 does the same at ``import torch``, also in
    the processes that the program starts.

    The replacement applies to ``init_process_group`` and ``new_group`` with "gloo" and with specs
    such as "cpu:gloo,cuda:nccl", to DeviceMesh, and to calls of ``ProcessGroupGloo(...)``.
    Such groups take device tensors as gloo does, through host memory (Options.staged).
    ``dist.get_backend()`` and ``isinstance(..., ProcessGroupGloo)`` still say gloo; use
    backends_of() to find out. It does not apply to names that the program imported from torch
    before, to 'ft:gloo', and to the classes of torchft_ext.process_group over gloo.

    Returns:
        A context manager that ends the replacement when its block ends.

    Threads: one at a time. Source: torch's ProcessGroupGloo.
    """
    return Replacement()


def backends_of(group: dist.ProcessGroup | None = None) -> tuple[_C.Backend, ...]:
    """Return the backends of this package that a group has. Does not block.

    Args:
        group: the process group. If None, the default group is used.

    Returns:
        The backends. Empty if the group has only backends of others.

    Raises:
        ValueError: If there is no default group.
    """
    return tuple(_backends.backends_of(c10d._get_default_group() if group is None else group))
