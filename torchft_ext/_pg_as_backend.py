"""The handle of a group whose operations are Python's, as torchft_ext.backend() returns it."""

from __future__ import annotations

from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C import _distributed_c10d as _c10d

from torchft_ext import _C
from torchft_ext._pg_arguments import limit_of

if TYPE_CHECKING:
    from torchft_ext._pg_base import ProcessGroup

ABORTED = "abort() was called"
# Of the call that is under way: the groups' public methods have no such arguments, and a subclass
# may override those.
_within: ContextVar[timedelta | None] = ContextVar("limit of configure()", default=None)
_why: ContextVar[str] = ContextVar("reason of abort()", default=ABORTED)


def configure_within(
    group: ProcessGroup, store_addr: str, rank: int, world_size: int, within: timedelta | None
) -> None:
    """Call a group's configure() with a limit; None: the group's own."""
    token = _within.set(within)
    try:
        group.configure(store_addr, rank, world_size)
    finally:
        _within.reset(token)


def abort_because(group: ProcessGroup, why: str) -> None:
    """Call a group's abort() with a reason."""
    token = _why.set(why)
    try:
        group.abort()
    finally:
        _why.reset(token)


def told_limit() -> timedelta | None:
    """Return the limit of the configure() that is under way; None: the group's own."""
    return _within.get()


def told_reason() -> str:
    """Return the reason of the abort() that is under way."""
    return _why.get()


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
        configure_within(self._group, store_addr, rank, world_size, within)

    def abort(self, why: str = ABORTED) -> None:
        """As Backend.abort()."""
        abort_because(self._group, why)

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
