"""Groups over torch's own backends, and over those that a program declares: gloo first.

The backend is made anew for each generation. Owners and threads are those of `_pg_guarded.py`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from torchft_ext import _C
from torchft_ext._pg_declared import capabilities_of, registered
from torchft_ext._pg_generation import Generation
from torchft_ext._pg_guarded import GuardedGroup
from torchft_ext_names import gloo


class ProcessGroupBackend(GuardedGroup):
    """A group over a backend of torch's or of the program's, which each generation makes again.

    It adds to the backend: waiters return within milliseconds of abort() and of a member's death;
    configure() begins another generation; and there are operations that gloo lacks in some versions
    (averages, reduce_scatter, futures of receives). It serves CPU tensors.

    It costs a copy of each input and output, unless the backend is declared quiet_after_abort; a
    thread; and a guard, which is a group like ProcessGroupHost that carries no data.

    On failure, wait() and futures raise CommError. The tensors of a failed operation hold their old
    values, or the result if it was just being copied. A member that freezes is noticed after
    Options.heartbeat.
    """

    def __init__(
        self,
        name: str,
        timeout: float | timedelta = timedelta(seconds=60),
        *,
        options: _C.Options | None = None,
    ) -> None:
        """Make a group without members; configure() begins its first generation.

        Args:
            name: the name of a backend that was passed to declare_backend(), or "gloo".
            timeout: of operations and of configure(); seconds, or a timedelta.
            options: of the guard: interface, ports, heartbeat.

        Raises:
            ValueError: If no such backend was declared.
            NotImplementedError: If the backend can be made only once ("mpi").
        """
        capabilities = capabilities_of(name)
        copies = not capabilities.quiet_after_abort
        super().__init__(name.lower(), timeout, options, copies)
        self._make = capabilities.make or registered(name)

    def _backend(
        self, store: Store, rank: int, size: int, timeout: timedelta, _attempt: int
    ) -> Any:
        return _as_group(self._make(store, rank, size, timeout), store, rank, size)

    def _adopted(self, generation: Generation, backends: list[Any]) -> None:
        if not self._copies:
            generation.silence = backends[0].abort


class ProcessGroupGloo(ProcessGroupBackend):
    """torch's gloo, with abort() and any number of generations.

    See ProcessGroupBackend. Use it for gloo's own results and algorithms. ProcessGroupHost is
    faster, because it makes no copies.
    """

    def __init__(
        self,
        timeout: float | timedelta = timedelta(seconds=60),
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        """Make a group without members; configure() begins its first generation.

        Args:
            timeout: of operations and of configure(); seconds, or a timedelta.
            pg: a ProcessGroupGloo. If given, this object is a second one for the same group, and
                passes all calls on to `pg`. If None, it is a group of its own.

        Raises:
            TypeError: `pg` is a group of another class.
            ValueError: the timeout is not positive.
        """
        if pg is not None and not isinstance(pg, ProcessGroupGloo):
            raise TypeError(
                f"ProcessGroupGloo: pg: expected a ProcessGroupGloo, found {type(pg).__name__}; "
                "ProcessGroupWrapper takes any group"
            )
        super().__init__("gloo", timeout)
        self._other = pg

    def _begin(self, store_addr: str, rank: int, world_size: int, within: timedelta | None) -> None:
        if self._other is None:
            super()._begin(store_addr, rank, world_size, within)
        else:
            self._other._begin_as_told(store_addr, rank, world_size, within)

    def _issue(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        issue = super()._issue if self._other is None else self._other._issue
        return issue(name, args, kwargs)

    def rank(self) -> int:
        return super().rank() if self._other is None else self._other.rank()

    def size(self) -> int:
        return super().size() if self._other is None else self._other.size()

    def errored(self) -> Exception | None:
        return super().errored() if self._other is None else self._other.errored()

    def _generation_number(self) -> int:
        other = self._other
        return super()._generation_number() if other is None else other._generation_number()

    def retired(self) -> int:
        return super().retired() if self._other is None else self._other.retired()

    def _abort(self, why: str) -> None:
        if self._other is None:
            super()._abort(why)
        else:
            self._other._abort(why)

    def shutdown(self) -> None:
        if self._other is None:
            super().shutdown()
        else:
            self._other.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        if self._other is not None:
            self._other.set_timeout(timeout)


def _as_group(made: Any, store: Store, rank: int, size: int) -> dist.ProcessGroup:
    """Return a group of torch's around a backend, whose methods take what users give."""
    if isinstance(made, dist.ProcessGroup):
        return made
    types = dist.ProcessGroup.BackendType
    kind = types.GLOO if isinstance(made, gloo(c10d)) else types.CUSTOM
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), kind, made)
    group._set_default_backend(kind)
    return group
