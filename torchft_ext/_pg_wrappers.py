"""torchft's process groups that stand in front of another group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.futures import Future

from torchft_ext._pg_arguments import in_order, limit_of, reduction_in, tensors_in
from torchft_ext._pg_as_backend import abort_because, configure_within
from torchft_ext._pg_base import GroupWithoutBackend, ProcessGroup, await_work, finished
from torchft_ext._pg_store import check_meeting_place, store_for_configure

# Every method of torch's group that issues something and returns a Work.
OPERATIONS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_single",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
# The other names that they have in some versions of torch.
NEW_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "gather_into_tensor": "gather_single",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
_TIMES = (float, int, timedelta)
_Class = TypeVar("_Class", bound=type[ProcessGroup])


class _Issues(Protocol):
    def _issue(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work: ...


def with_operations(cls: _Class) -> _Class:
    """Give a class every operation of OPERATIONS, each by the class's `_issue()`."""

    def method(name: str) -> Callable[..., dist.Work]:
        def issue(self: _Issues, *args: Any, **kwargs: Any) -> dist.Work:
            return self._issue(name, args, in_order(kwargs))

        issue.__name__ = name
        issue.__doc__ = f"Issue what torch's ProcessGroup.{name} does."
        return issue

    for name in OPERATIONS:
        setattr(cls, name, method(name))
    for new, old in NEW_NAMES.items():
        setattr(cls, new, method(old))
    return cls


@with_operations
class ProcessGroupWrapper(GroupWithoutBackend):
    """A group that passes everything on to another one.

    Subclasses can change calls on the way. The object stays the same when its parent, the other
    group, is configured again. It costs a Python call for each operation. On failure: as the
    parent.

    A subclass may start without a parent, or with a group of torch's, if it defines
    ``_create_pg(store, rank, world_size)``. Each configure() then calls that, with a client of the
    store at the address, to make the next parent.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup | float | timedelta | None = None,
        timeout: float | timedelta | dist.ProcessGroup | None = timedelta(seconds=60),
    ) -> None:
        """Wrap a group. Does not block.

        Args:
            pg: the parent. If None, there is none before configure().
            timeout: the limit for connecting to the store, for `_create_pg`; seconds, or a
                timedelta. It may also come before `pg`, as in torchft 0.2.0.
        """
        super().__init__()
        if isinstance(pg, _TIMES):
            pg, timeout = (None if isinstance(timeout, _TIMES) else timeout), pg
        self._parent: Any = pg
        self._timeout: Any = None if timeout is None else limit_of(type(self).__name__, timeout)

    @property
    def parent(self) -> dist.ProcessGroup:
        """The group behind this one.

        Raises:
            RuntimeError: If there is none yet, or no longer one.
        """
        if self._parent is None:
            raise RuntimeError(
                f"{type(self).__name__}: process group not initialized: call configure() before"
            )
        parent: dist.ProcessGroup = self._parent
        return parent

    def _create_pg(self, _store: dist.Store, _rank: int, _world_size: int) -> dist.ProcessGroup:
        return self._unable("group to configure: give it one, or define _create_pg()")

    def _issue(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        work: dist.Work = getattr(self.parent, name)(*args, **kwargs)
        return work

    def _begin(self, store_addr: str, rank: int, world_size: int, within: timedelta | None) -> None:
        parent = self._parent
        if not isinstance(parent, ProcessGroup):
            self._renew(store_addr, rank, world_size, within)
        else:
            configure_within(parent, store_addr, rank, world_size, within)

    def _renew(self, store_addr: str, rank: int, world_size: int, within: timedelta | None) -> None:
        """Have the subclass make the next parent."""
        if type(self)._create_pg is ProcessGroupWrapper._create_pg:
            self._unable("group to configure: give it one, or define _create_pg()")
        check_meeting_place(store_addr)
        self.abort()
        self._parent = None
        store = store_for_configure(store_addr, within or self._timeout)
        self._parent = self._create_pg(store, rank, world_size)

    def rank(self) -> int:
        return 0 if self._parent is None else self.parent.rank()

    def size(self) -> int:
        return 1 if self._parent is None else self.parent.size()

    def _generation_number(self) -> int:
        parent = self._parent
        return parent._generation_number() if isinstance(parent, ProcessGroup) else 0

    def getBackendName(self) -> str:
        return self.parent.name()

    def errored(self) -> Exception | None:
        parent = self._parent
        return parent.errored() if isinstance(parent, ProcessGroup) else None  # torch's tell not

    def _abort(self, why: str) -> None:
        if isinstance(self._parent, ProcessGroup):
            abort_because(self._parent, why)
        elif self._parent is not None:
            with suppress(RuntimeError):  # torch's backends that cannot
                self._parent.abort()

    def shutdown(self) -> None:
        if self._parent is not None:
            self._parent.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = limit_of("set_timeout", timeout)
        if isinstance(self._parent, ProcessGroup):
            self._parent.set_timeout(timeout)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pg={self._parent})"


class _SwallowingWork(_c10d.Work):
    """Of an operation whose failure is reported to its group, and not raised."""

    def __init__(
        self, work: dist.Work, tensors: list[torch.Tensor], report: Callable[[Exception], None]
    ) -> None:
        super().__init__()
        self._work = work
        self._tensors = tensors
        self._report = report

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            await_work(self._work, timeout)
        except Exception as error:
            self._report(error)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Future[Any]:
        def swallow(future: Future[Any]) -> Any:
            try:
                value = future.value()
            except Exception as error:
                value = error
            if not isinstance(value, Exception):  # as a value: futures that Python has completed
                return value
            self._report(value)
            return self._tensors

        future: Future[Any] = self._work.get_future()
        return future.then(swallow)


def swallowing(
    issue: Callable[[], dist.Work],
    tensors: list[torch.Tensor],
    report: Callable[[Exception], None],
    *,
    skip: bool,
) -> dist.Work:
    """Issue an operation whose failure is reported, and not raised.

    Args:
        issue: issues it.
        tensors: what the operation's future has in place of a failure.
        report: is told of the failure.
        skip: whether to issue nothing.
    """
    if skip:
        return finished(tensors)
    try:
        return _SwallowingWork(issue(), tensors, report)
    except Exception as error:
        report(error)
        return finished(tensors)


def _tensors_of_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of an operation's first argument: its outputs."""
    given = [*args, *kwargs.values()]
    return list(tensors_in(given[0])) if given else []


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """A group whose operations never raise: after an error they do nothing until configure().

    Use it in training loops that look at error() once a step. This applies to every operation and
    every future, and to bad arguments too. The tensors of an operation that failed or was skipped
    hold no result. As with torchft's class, error() is the last error that was reported.
    """

    def __init__(self, pg: dist.ProcessGroup) -> None:
        super().__init__(pg)
        self._error: Exception | None = None

    def _begin(self, store_addr: str, rank: int, world_size: int, within: timedelta | None) -> None:
        super()._begin(store_addr, rank, world_size, within)
        self._error = None

    def report_error(self, e: Exception) -> None:
        """Set error(), and skip all operations until configure()."""
        self._error = e

    def error(self) -> Exception | None:
        """Return the last error since configure(), or None if there was none."""
        return self._error

    def errored(self) -> Exception | None:
        """Return error(), or else the failure of the generation. torchft's Manager calls this."""
        return self._error or super().errored()

    def _issue(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        return swallowing(
            partial(super()._issue, name, args, kwargs),
            _tensors_of_first(args, kwargs),
            self.report_error,
            skip=self._error is not None,
        )


class Manager(Protocol):
    """What ManagedProcessGroup needs of torchft's Manager."""

    _pg: dist.ProcessGroup

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: Any) -> dist.Work: ...
    def errored(self) -> object: ...
    def report_error(self, e: Exception) -> None: ...
    def num_participants(self) -> int: ...


class ManagedProcessGroup(ProcessGroupWrapper):
    """A group whose sums go through torchft's Manager, which decides who takes part.

    size() is the number of participants, so that averages follow the quorum. Other operations go to
    the Manager's group.

    No operation raises. Its error is reported to the Manager, which then does not commit the step,
    and operations are skipped until the next quorum. Bad arguments are reported in the same way,
    except those of a sum. A failed sum returns its input. Other tensors of an operation that failed
    or was skipped hold no result.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(manager._pg)
        self._manager = manager

    def size(self) -> int:
        return self._manager.num_participants()

    def _issue(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        if name == "allreduce":
            return self._sum(*args, *kwargs.values())
        manager = self._manager
        return swallowing(
            partial(super()._issue, name, args, kwargs),
            _tensors_of_first(args, kwargs),
            manager.report_error,
            skip=manager.errored() is not None,
        )

    def _sum(self, given: Any = (), *options: Any) -> dist.Work:
        tensors = list(tensors_in(given))
        if len(tensors) != 1:
            raise ValueError(
                f"ManagedProcessGroup: allreduce: expected one tensor, found {len(tensors)}"
            )
        return self._manager.allreduce(tensors[0], reduce_op=reduction_in(options))


@with_operations
class ProcessGroupDummy(GroupWithoutBackend):
    """A group of one rank that exchanges nothing: each operation succeeds with its own input.

    Use it for libraries that need a group although there is no peer. Operations with inputs and
    outputs copy, as in a world of one. send() and recv() do not change the tensor.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        """Make a group of one rank.

        Raises:
            ValueError: If the rank is not 0, or the world size is not 1.
        """
        if (rank, world) != (0, 1):
            raise ValueError(
                f"ProcessGroupDummy: expected rank 0 of 1, found rank {rank} of {world}"
            )
        super().__init__()
        self.configure_count = 0

    def _begin(
        self, _store_addr: str, rank: int, world_size: int, _within: timedelta | None
    ) -> None:
        if (rank, world_size) != (0, 1):
            raise ValueError(
                f"ProcessGroupDummy: configure: expected rank 0 of 1, found rank {rank} of "
                f"{world_size}"
            )
        self.configure_count += 1

    def _generation_number(self) -> int:
        return self.configure_count

    @property
    def reconfigure_count(self) -> int:
        """As torchft's nightlies call configure_count."""
        return self.configure_count

    def getBackendName(self) -> str:
        return "ft:dummy"

    def __repr__(self) -> str:
        return "ProcessGroupDummy()"  # it is rank 0 of 1

    def _issue(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        given = [*args, *kwargs.values()]
        outputs = list(tensors_in(given[0])) if given else []
        second = given[1] if len(given) > 1 else None
        if isinstance(second, (torch.Tensor, list, tuple)):
            with torch.no_grad():
                # A ManagedProcessGroup in front may tell of more members: outputs are left over.
                for output, source in zip(outputs, tensors_in(second), strict=False):
                    output.copy_(source.reshape(output.shape))
        return finished(outputs)
