"""Operations of a generation over a backend that cannot be aborted, and their Works.

Owners: a generation (`_pg_generation.py`) owns an operation until it has ended; its Work and the
backend's work hold it, too. An operation asks its generation whether it still may write the
caller's tensors, and tells it of failures.

Threads: the caller's issue and wait. The backend's complete operations, or helpers
(`_pg_helpers.py`) where its works have no future. Callbacks of futures run on threads of the
library.

| state of an operation | who may write the caller's tensors | what abort does |
|---|---|---|
| pending | nobody: the backend works on copies | fails it, and its waiters return |
| copying | the thread that completes it | waits for the copy, which ends as a success |
| ended | nobody | nothing |
"""

from __future__ import annotations

import copy
import threading
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.futures import Future

from torchft_ext import _C
from torchft_ext._pg_arguments import seconds_of
from torchft_ext._pg_base import await_work
from torchft_ext._pg_helpers import helpers
from torchft_ext._pg_staging import Staged
from torchft_ext.errors import CommError

GRACE = 5.0  # seconds that a backend may be late in telling that an operation's time is over
COPY_LIMIT = 60.0  # seconds; of a copy that abort() waits for
_OF_TWO = ("recv", "recv_anysource", "send")
_WITHOUT_FUTURES = _OF_TWO


class BackendError(RuntimeError):
    """A backend's own word, of this package, on how an operation of it failed.

    Attributes:
        rank: whose doing it was; -1: not known.
    """

    def __init__(self, text: str, rank: int = -1) -> None:
        super().__init__(text)
        self.rank = rank


class LateError(BackendError):
    """The operation's limit has passed."""


class LostBackendError(BackendError):
    """The backend is gone; the text says how."""


class RefusedError(ValueError):
    """A backend's word that the arguments of an operation are bad, which came after its issue."""


class TellingWork(_c10d.Work):
    """A work of a backend of this package, which tells one operation of its end."""

    def tell(self, operation: Operation) -> None:
        """Have operation.completed() called, at once where it has ended."""
        raise NotImplementedError


class Owner(Protocol):
    """What an operation asks of its generation."""

    size: int  # members

    def begin_copy(self, operation: Operation) -> bool:
        """Say whether the operation still may write the caller's tensors; then end_copy() ends
        that."""

    def end_copy(self) -> None:
        """Note that it has written them."""

    def backend_ended(self) -> None:
        """Note that the backend is out of one operation."""

    def remove(self, operation: Operation) -> bool:
        """Forget an operation that the backend refused; False: it has ended otherwise."""

    def report(self, operation: Operation, error: Exception) -> None:
        """The backend failed in an operation: find out why, and end the generation. Does not
        block."""

    def time_is_over(self, operation: Operation) -> None:
        """A waiter's limit has passed: end the generation."""


class Operation:
    """What was issued once, for its Work, its future and whoever completes it. Never blocks the
    thread that completes it, but for the copy."""

    def __init__(self, generation: Owner, name: str, staged: Staged, limit: timedelta) -> None:
        self.name = name
        self.limit = limit
        self.began = time.monotonic()
        self.number = 0
        self.source = -1  # the rank that a message came from
        self._generation = generation
        self._peer = _peer_in(staged) if name in _OF_TWO else -1
        self._staged: Staged | None = staged
        self._result = staged.result
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._ended = threading.Event()
        self._promise: _C._Promise | None = None
        self._future: Future[list[torch.Tensor]] | None = None

    def follow(self, work: dist.Work) -> None:
        """Have this end when the backend's work has."""
        if isinstance(work, TellingWork):
            work.tell(self)
        elif self.name in _WITHOUT_FUTURES:
            helpers.run(lambda: self._attend(work))
        else:
            work.get_future().add_done_callback(self._completed)

    def _attend(self, work: dist.Work) -> None:
        try:
            await_work(work, self.limit)
            if self.name == "recv_anysource":
                self.source = work._source_rank()
        except Exception as error:
            self._fail(error)
        else:
            self._succeed()

    def _completed(self, future: Future[Any]) -> None:
        try:
            value = future.value()
        except Exception as error:
            value = error
        if isinstance(value, Exception):  # as a value: futures that Python has completed
            self._fail(value)
        else:
            self._succeed()

    def wanted_of(self, leavers: dict[int, Exception]) -> Exception | None:
        """Return how a member left that this operation needs; None: it needs none of these."""
        if self.name == "recv_anysource":
            some_stay = len(leavers) < self._generation.size - 1
            return None if some_stay else next(iter(leavers.values()), None)
        if self.name in _OF_TWO:
            return leavers.get(self._peer)
        return next(iter(leavers.values()), None)

    def refused(self, error: Exception) -> None:
        """The backend failed as it was given the operation."""
        self._fail(error)

    def completed(self, error: Exception | None, source: int) -> None:
        """The backend, a TellingWork, is out of it; a RefusedError is its caller's alone."""
        self.source = source
        if isinstance(error, RefusedError):
            if self._generation.remove(self):
                self.end(error)
                self.tell()
        elif error is not None:
            self._fail(error)
        else:
            self._succeed()

    def _fail(self, error: Exception) -> None:
        self._generation.backend_ended()
        self._generation.report(self, error)

    def _succeed(self) -> None:
        self._generation.backend_ended()
        staged = self._staged
        if staged is None or not self._generation.begin_copy(self):
            return
        error: Exception | None = None
        try:
            staged.copy_out()
        except Exception as raised:  # the caller's tensor has changed its size, say
            error = raised
        self.end(error)
        self._generation.end_copy()
        self.tell()

    def end(self, error: Exception | None) -> None:
        """Wake the waiters; the generation calls it once."""
        self._error = error
        if error is not None:
            self._result = []  # a backend that stays busy holds this, and not the caller's tensors
        staged, self._staged = self._staged, None  # and with it the copies
        try:
            if staged is not None:
                staged.room.release()
        finally:
            self._ended.set()

    def tell(self) -> None:
        """Complete the future, after end(). Its callbacks run on threads of the library."""
        with self._lock:
            promise, self._promise = self._promise, None
        if promise is None:
            return
        if self._error is None:
            promise.complete(self._result)
        else:
            promise.fail(self._error, _made_anew(self._error))

    def error(self) -> Exception | None:
        return self._error

    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, limit: float | None) -> None:
        """Block until it has ended; None: up to its own limit.

        Raises:
            CommError: it failed; past the limit the generation fails with it.
        """
        rest = self.began + seconds_of(self.limit) + GRACE - time.monotonic()
        if not self._ended.wait(max(rest, 0.0) if limit is None else limit):
            self._generation.time_is_over(self)
            self._ended.wait(COPY_LIMIT)
        if self._error is not None:
            raise _copied(self._error)

    def value(self) -> list[torch.Tensor]:
        if self._error is not None:
            raise _copied(self._error)
        return self._result

    def future(self) -> Future[list[torch.Tensor]]:
        with self._lock:
            if self._future is None:
                self._promise = _C._Promise()
                self._future = self._promise.future
        if self.has_ended():
            self.tell()  # whoever ended it may have looked before there was a promise
        return self._future


def _copied(error: Exception) -> Exception:
    """Return one to raise: the group keeps its error, and is not to keep the frames of callers."""
    return copy.copy(error) if isinstance(error, CommError) else error


def _made_anew(error: Exception) -> object:
    """Return what to make an error like this one of, at each raise: its class's arguments.

    A future holds that for ever. If it held an error that is raised, it would hold the frames that
    were raised through too, and these the future: Python finds no cycle that goes through C++.
    """
    if isinstance(error, CommError):
        return (copy.copy(error),)
    return error.args if type(error).__module__ == "builtins" else copy.copy(error)


class StagedWork(_c10d.Work):
    """A Work of a group over a staged backend.

    wait() and the future raise the CommError that the operation failed with.
    """

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation = operation

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = 0.0 if timeout is None else seconds_of(timeout)
        self._operation.wait(limit if limit > 0 else None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._operation.has_ended()

    def is_success(self) -> bool:
        return self.is_completed() and self._operation.error() is None

    def exception(self) -> Exception | None:
        return self._operation.error()

    def result(self) -> list[torch.Tensor]:
        return self._operation.value()

    def source_rank(self) -> int:
        return self._operation.source

    def _source_rank(self) -> int:
        return self._operation.source

    def get_future(self) -> Future[Any]:
        return self._operation.future()


def _peer_in(staged: Staged) -> int:
    """Return the other end of a send or recv; -1: recv from any."""
    named = [value for name, value in staged.kwargs.items() if name in ("dstRank", "srcRank")]
    given = [*staged.args[1:2], *named]
    return given[0] if given and staged.method != "recv_anysource" else -1
