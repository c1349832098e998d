"""What torchft's process groups have in common: configure(), registration, size."""

from __future__ import annotations

import copy
import threading
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from torchft_ext import _groups
from torchft_ext._configure_arguments import Membership
from torchft_ext._pg_arguments import limit_of, seconds_of
from torchft_ext._pg_as_backend import GroupAsBackend, told_limit, told_reason
from torchft_ext._pg_reconfigure import Handles
from torchft_ext.errors import CommTimeoutError, PeerLeftError, PeerLostError

_LIMITLESS = "finite timeout not implemented"  # of c10d's FutureWrappingWork, torch 2.11 to 2.15


def _place_in(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[int, int]:
    """Return rank and size of a constructor's arguments, in torch's two forms; none: 0 of 1."""
    named = [kwargs[name] for name in ("store", "rank", "size", "world_size") if name in kwargs]
    given = [one for one in (*args, *named) if not isinstance(one, dist.Store)]
    numbers = [one for one in given if isinstance(one, int)]
    if len(named) < len(kwargs) or len(numbers) != len(given) or len(given) not in (0, 2):
        raise TypeError(
            f"ProcessGroup: expected a rank and a size, or a store before them, found {args} "
            f"{kwargs or ''}"
        )
    return (numbers[0], numbers[1]) if numbers else (0, 1)


class FinishedWork(_c10d.Work):
    """A Work that has succeeded; torch's own of a future takes no limit in wait()."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def block_current_stream(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Future[list[torch.Tensor]]:
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(self._tensors)
        return future


def finished(tensors: list[torch.Tensor]) -> dist.Work:
    """Return a Work that has succeeded with these tensors."""
    return FinishedWork(tensors)


def await_work(work: dist.Work, timeout: timedelta | None) -> None:
    """Have a Work of any class wait for so long; None, or zero: up to its own limit.

    Raises:
        TimeoutError: the limit has passed, of a Work that torch has made of a future: it takes no
            limit by itself.
        Exception: what the Work raises.
    """
    limit = timedelta(0) if timeout is None else timeout
    try:
        work.wait(limit)
    except RuntimeError as error:
        if limit == timedelta(0) or _LIMITLESS not in str(error):
            raise
        _await_future(work.get_future(), limit)
        work.wait()


def _await_future(future: Future[Any], limit: timedelta) -> None:
    complete = threading.Event()
    future.add_done_callback(lambda _: complete.set())
    if not complete.wait(seconds_of(limit)):
        raise TimeoutError(f"wait: timed out after {limit.total_seconds():g} s")


def in_torchfts_words(error: Exception) -> Exception:
    """Have its text say "aborted", all that torchft's own groups say: callers look for it."""
    return error if "aborted" in str(error) else _with(error, "the generation was aborted")


def _with(error: Exception, words: str) -> Exception:
    if words in str(error):
        return error
    said = copy.copy(error)
    said.args = (f"{error} ({words})",)
    return said


class ProcessGroup(dist.ProcessGroup):
    """A ProcessGroup of torch's that can change its size: base of torchft_ext.process_group.

    Create one of the subclasses. The constructor takes the arguments of torch's class: rank and
    size, or store, rank and size. Without arguments the group has rank 0 of 1.

    In addition to torch's methods there are configure(), an abort() after which configure() can be
    called, errored(), register() for functional collectives, and broadcast_one(). All collectives
    are torch's own methods.

    Threads: any. On failure, operations raise from wait() and from their futures. The object can be
    used again after configure(). Source: torchft's class of this name.
    """

    _name: str | None = None
    _description = "undefined"  # torch's own word

    def __init__(self, *args: object, **kwargs: object) -> None:
        # torch's own rank() asks getRank() below, and so would never return.
        self._fixed = _place_in(args, kwargs)
        super().__init__(*self._fixed)  # type: ignore[call-arg, arg-type]  # not in torch's stub
        self._registered: str | None = None
        self._handles = Handles()

    def configure(self, store_addr: str, *args: object, **kwargs: object) -> None:
        """Begin another generation of this group.

        Blocks, without the GIL, until all members have joined, up to the timeout. There are two
        forms, by position or by name: ``configure(store_addr, rank, world_size)``, and torchft
        0.2's ``configure(store_addr, replica_id, rank, world_size, quorum_id, group_rank,
        group_world_size, global_ranks)``, of which only rank and world_size are used.

        Args:
            store_addr: the address of a TCPStore, "host:port/prefix". Use a new prefix for each
                generation.
            *args: the other arguments of either form.
            **kwargs: the same, by name.

        Raises:
            CommError: If the generation could not be formed. configure() may be called again.
            TypeError, ValueError: If an argument is bad. The group does not change.
        """
        membership = Membership.of(args, kwargs)
        self._begin_as_told(store_addr, membership.rank, membership.world_size, told_limit())

    def _begin_as_told(
        self, store_addr: str, rank: int, world_size: int, within: timedelta | None
    ) -> None:
        limit = None if within is None else limit_of("configure", within)
        try:
            self._begin(store_addr, rank, world_size, limit)
        except CommTimeoutError as error:
            raise _with(error, self._words_of_lateness(error.limit or timedelta(0))) from None
        if self in c10d._world.pg_group_ranks:
            self._enter_ranks()

    # As torch has it since 2.14, and torchft's Manager asks for it.
    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        """Return the handle that identifies this member in reconfigure() of all members.

        The first call opens a TCPStore on all interfaces, which lives as long as this object. The
        handle contains this host's name, which the other members must be able to resolve.
        """
        return self._handles.handle()

    def reconfigure(self, opts: Any) -> dist.Work:
        """Begin another generation with the members of some handles, which give their ranks.

        Blocks, as configure() does, up to `opts.timeout` or, if that is None, the group's timeout.
        If a backend is being made at that time, it has five seconds more.

        Args:
            opts: torch 2.14's ReconfigureOptions. Use a new `uuid` for each generation.

        Returns:
            A Work that has succeeded.

        Raises:
            CommError: As configure() does.
            ValueError: If the handles are not a list, belong to another kind of group, or do not
                contain the handle of this member.
        """
        meeting = self._handles.meeting(opts)
        self._begin_as_told(*meeting, opts.timeout)
        return finished([])

    def _generation_number(self) -> int:
        """Return the number of the last generation; 0 before the first."""
        return 0

    def _begin(
        self, _store_addr: str, _rank: int, _world_size: int, _within: timedelta | None
    ) -> None:
        self._unable("configure()")

    def _words_of_lateness(self, limit: timedelta) -> str:
        """Return what torchft's group of this kind says where configure() was not in time."""
        return f"timeout after {limit // timedelta(milliseconds=1)}ms"

    def _as_backend(self) -> GroupAsBackend:
        """Return what torchft_ext.backend() does for a group without a native backend."""
        return GroupAsBackend(self)

    def _unable(self, call: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {call}")

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> dist.Work:
        """Broadcast one tensor from the rank `root`; otherwise as broadcast()."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self.broadcast([tensor], options)

    def rank(self) -> int:
        """Return the rank of this process in the generation; 0 before the first one."""
        return self._fixed[0]

    def size(self) -> int:
        """Return the world size of the generation; 1 before the first one."""
        return self._fixed[1]

    # How torch's C++ asks, for the properties group_name and group_desc too.
    def getRank(self) -> int:
        return self.rank()

    def getSize(self) -> int:
        return self.size()

    # torch's own class keeps both names in its backends: a group has none before its first
    # configure(), and may share one with another group.
    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        if self._name is None:
            raise RuntimeError("ProcessGroup name not set")  # torch's own words
        return self._name

    def getBackendName(self) -> str:
        """Return the name of the backend, for the log and for torch."""
        return self._unable("getBackendName()")

    def name(self) -> str:
        return self.getBackendName()

    def errored(self) -> Exception | None:
        """Return the failure of the generation, or None if it has not failed. Does not block."""
        return None

    def abort(self, errored: bool = True) -> None:
        """End the generation on every rank, and release all waiters.

        Args:
            errored: ignored. torchft's groups log the abort if it is True.

        Threads: any, at any time.
        """
        self._abort(told_reason())

    def _abort(self, _why: str) -> None:
        """Do it; errors of all ranks say why."""

    def shutdown(self) -> None:
        """Say goodbye to the other members and end the generation for good."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of later operations and of later calls of configure().

        Raises:
            ValueError, TypeError: not a positive time; the limit is as it was.
        """
        limit_of("set_timeout", timeout)

    def register(self, name: str) -> ProcessGroup:
        """Register the group under a name, so that functional collectives can use it.

        That includes compiled ones. torch's rank tables then contain the group, with global ranks
        of its own: 0 to size - 1, which follow configure(). No default group is needed. A group can
        be registered once, until unregister().

        Args:
            name: the name.

        Returns:
            This group.

        Raises:
            ValueError: If the group is registered already, or another group has the name.
        """
        if self._registered is not None:
            raise ValueError(
                f"register: expected a group without a name, found '{self._registered}'"
            )
        if name in c10d._world.pg_names.values():
            raise ValueError(f"register: name: expected one that is free, found '{name}'")
        own: Any = name  # a type of its own since torch 2.13
        self._set_group_name(own)
        _c10d._register_process_group(own, self)
        self._registered = name
        _groups.enter_numbered(self, name)
        return self

    def _enter_ranks(self) -> None:
        c10d._world.pg_group_ranks[self] = {rank: rank for rank in range(self.size())}

    def unregister(self) -> None:
        """Undo register().

        Raises:
            ValueError: it is not registered.
        """
        if self._registered is None:
            raise ValueError("unregister: expected a registered group, found one without a name")
        registered: Any = self._registered
        _c10d._unregister_process_group(registered)
        _groups.leave_numbered(self)
        self._registered = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank()}, size={self.size()})"


class _ErrorView:
    """What stands for the backend of a group that has none: it tells how the group is."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def get_error(self) -> _c10d.ErrorType:
        error = self._group.errored()
        if error is None:
            return _c10d.ErrorType.SUCCESS
        if isinstance(error, CommTimeoutError):
            return _c10d.ErrorType.TIMEOUT
        if isinstance(error, (PeerLostError, PeerLeftError)):
            return _c10d.ErrorType.REMOTE_ERROR
        return _c10d.ErrorType.COMM_ERROR


class GroupWithoutBackend(ProcessGroup):
    """Base of groups whose operations are Python's."""

    # torchft's Manager, since it has reconfigure(), asks the backends whether a step may count.
    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, _device: torch.device) -> Any:
        return _ErrorView(self)
