"""torchft's process groups over this package's own engines."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist

from torchft_ext import _C
from torchft_ext._group_made import group_made
from torchft_ext._pg_arguments import limit_of
from torchft_ext._pg_base import ProcessGroup, in_torchfts_words
from torchft_ext._pg_store import check_meeting_place, store_for_configure

_number = itertools.count()


class _OwnGroup(ProcessGroup):
    """A group whose operations run on this package's backend, without a wrapper around them."""

    _engine: ClassVar[str]
    _devices: ClassVar[tuple[str, ...]]
    _reopens: ClassVar[bool] = False  # configure() may follow shutdown()

    def __init__(
        self,
        timeout: float | timedelta = timedelta(seconds=60),
        *,
        options: _C.Options | None = None,
    ) -> None:
        """Make a group without members; configure() begins its first generation.

        Does not block, and opens nothing.

        Args:
            timeout: of operations and of configure(); seconds, or a timedelta.
            options: of the backend.

        Raises:
            ValueError, TypeError: the timeout is not a positive time.
        """
        super().__init__()
        self._timeout = limit_of(type(self).__name__, timeout)
        self._options = options
        self._backend: _C.Backend | None = None
        self._shut_down = False
        self._label = f"{type(self).__name__}{next(_number)}"

    def _begin(self, store_addr: str, rank: int, world_size: int, within: timedelta | None) -> None:
        check_meeting_place(store_addr)
        if self._backend is None:
            self._backend = self._made(store_addr, within or self._timeout)
        if self._shut_down and self._reopens:
            self._backend._reopen()
            self._shut_down = False
        self._backend.configure(store_addr, rank, world_size, timeout=within)

    def _made(self, store_addr: str, within: timedelta) -> _C.Backend:
        """Make the backend: only now is it known towards which store this host has an address."""
        made = _C._create_backend(
            store_for_configure(store_addr, within),
            0,
            1,
            timeout=self._timeout,
            engine=self._engine,
            name=self._label,
            options=self._options,
            may_resize=True,
            begin=False,
        )
        self._have_serve(made, self._devices)
        group_made()
        return made

    def _have_serve(self, backend: _C.Backend, devices: tuple[str, ...]) -> None:
        custom = dist.ProcessGroup.BackendType.CUSTOM
        for device in devices:
            self._register_backend(torch.device(device), custom, backend)
        self._set_default_backend(custom)

    def _generation_number(self) -> int:
        return 0 if self._backend is None else self._backend.generation

    def rank(self) -> int:
        return 0 if self._backend is None else self._backend.rank()

    def size(self) -> int:
        return 1 if self._backend is None else self._backend.size()

    def errored(self) -> Exception | None:
        error = None if self._backend is None else self._backend.errored()
        return None if error is None else in_torchfts_words(error)

    def _abort(self, why: str) -> None:
        if self._backend is not None:
            self._backend.abort(why)

    def shutdown(self) -> None:
        if self._backend is not None:
            self._shut_down = True
            self._backend.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = limit_of("set_timeout", timeout)
        if self._backend is not None:
            self._backend.set_timeout(self._timeout)


class ProcessGroupHost(_OwnGroup):
    """A group for CPU tensors, over this package's own engine ("ft:host").

    It costs as much as init_process_group("ft:host"): no other process, and no copies. Deaths are
    noticed within milliseconds, a frozen member after Options.heartbeat. In torchft,
    ProcessGroupGloo has this role. configure() may be called after shutdown(). Threads of one
    process may be ranks, with a group each.
    """

    _engine = "host"
    _devices = ("cpu",)
    _reopens = True

    def getBackendName(self) -> str:
        return "ft:host"


class ProcessGroupNCCL(_OwnGroup):
    """A group for CUDA tensors, over NCCL ("ft:nccl").

    Call `torchft_ext.backend(group).check()` before you use a result. configure() raises
    NotImplementedError if this process has no NCCL or no device. This class itself has not been run
    with a device yet. Its engine has, on a simulator and on one GPU.
    """

    _engine = "nccl"
    _devices = ("cuda",)

    def __init__(
        self,
        pg: dist.ProcessGroup | float | timedelta | None = None,
        timeout: float | timedelta = timedelta(seconds=60),
        *,
        options: _C.Options | None = None,
    ) -> None:
        """Make a group without members; configure() begins its first generation.

        Does not block, and opens nothing.

        Args:
            pg: a ProcessGroupNCCL or ProcessGroupHost. If given, this object is a second one for
                the same group, and configure() and shutdown() are passed on to `pg`. If None, it is
                a group of its own. The timeout may also be given here, as in torchft 0.2.0.
            timeout: of operations and of configure(); seconds, or a timedelta.
            options: of the backend.

        Raises:
            TypeError: `pg` is a group of another class.
        """
        if isinstance(pg, (float, int, timedelta)):
            timeout = pg
            pg = None
        if pg is not None and not isinstance(pg, _OwnGroup):
            raise TypeError(
                "ProcessGroupNCCL: pg: expected a ProcessGroupNCCL or a ProcessGroupHost, found "
                f"{type(pg).__name__}; ProcessGroupWrapper takes any group"
            )
        super().__init__(timeout, options=options)
        self._other = pg

    def _begin(self, store_addr: str, rank: int, world_size: int, within: timedelta | None) -> None:
        if self._other is None:
            return super()._begin(store_addr, rank, world_size, within)
        self._other._begin_as_told(store_addr, rank, world_size, within)
        if self._backend is None and self._other._backend is not None:
            self._backend = self._other._backend
            self._have_serve(self._backend, self._other._devices)

    def shutdown(self) -> None:
        if self._other is None:
            super().shutdown()
        else:
            self._other.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        if self._other is not None:
            self._other.set_timeout(timeout)

    def getBackendName(self) -> str:
        return "ft:nccl"
