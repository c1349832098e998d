"""The handle of a group whose operations are Python's, as torchft_ext.backend() returns it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C import _distributed_c10d as _c10d

from torchft_ext import _C
from torchft_ext._pg_arguments import limit_of

if TYPE_CHECKING:
    from torchft_ext._pg_base import ProcessGroup


class GroupAsBackend:
    """What a program that has learned Backend's methods finds of them in such a group.

    Owner: whoever asked for it; it holds the group. Threads, and what it does after an abort: as
    the group. It has no stats(), no shrink() and nothing of devices: those raise AttributeError.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def configure(
        self, store_addr: str, rank: int, world_size: int, *, timeout: timedelta | None = None
    ) -> None:
        """As Backend.configure(); by the group's own."""
        within = None if timeout is None else limit_of("configure", timeout)
        self._group._begin_as_told(store_addr, rank, world_size, within)

    def abort(self, why: str = "abort() was called") -> None:
        """As Backend.abort()."""
        self._group._abort(why)

    def errored(self) -> Exception | None:
        """As Backend.errored()."""
        return self._group.errored()

    def get_error(self) -> _c10d.ErrorType:
        """As Backend.get_error()."""
        error: _c10d.ErrorType = self._group._get_backend(self._group._device_types[0]).get_error()
        return error

    def check(self, timeout: timedelta | None = None) -> None:
        """Raise what the generation failed with: results on the CPU count after their wait()."""
        error = self._group.errored()
        if error is not None:
            raise error

    def set_timeout(self, timeout: timedelta) -> None:
        """As Backend.set_timeout()."""
        self._group.set_timeout(timeout)

    def shutdown(self) -> None:
        """As the group's; configure() may follow."""
        self._group.shutdown()

    def rank(self) -> int:
        """As Backend.rank()."""
        return self._group.rank()

    def size(self) -> int:
        """As Backend.size()."""
        return self._group.size()

    @property
    def generation(self) -> int:
        """As Backend.generation."""
        return self._group._generation_number()

    @property
    def group_name(self) -> str:
        """As Backend.group_name; of a group without a name that of its class, with a number."""
        name = self._group._name
        return getattr(self._group, "_label", type(self._group).__name__) if name is None else name

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or not hasattr(_C.Backend, name):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        raise AttributeError(
            f"torchft_ext.backend(): {name}: a group of '{self._group.getBackendName()}' has none; "
            "groups of 'ft' have"
        )
