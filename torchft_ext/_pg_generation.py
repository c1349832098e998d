"""One generation of a group over a backend that cannot be aborted, and its operations.

Owners: the group (`_pg_backend.py`) owns its generation; a generation owns its operations until
they have ended; a Work holds its operation. A native group of this package, the guard, tells what
became of the members; it is the group's and outlives generations.

Threads: the caller's issue and wait. The backend's complete operations, or helpers of this module
where its works have no future. One thread for each generation waits for the guard's failure.

| state of an operation | who may write the caller's tensors | what abort does |
|---|---|---|
| pending | nobody: the backend works on copies | fails it, and its waiters return |
| copying | the thread that completes it | waits for the copy, which ends as a success |
| ended | nobody | nothing |

Where a member leaves or begins another generation, the generation stands until an operation that
wants it fails: in the backend, or because a second is over. So long have those that are pending, or
issued later, since the member may have completed its part; messages among others go on. A failed
generation takes no operations. Completions that come later are dropped: this is what keeps an
abandoned operation out of the caller's tensors.
"""

from __future__ import annotations

import copy
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.futures import Future

from torchft_ext import _C
from torchft_ext._pg_staging import Staged
from torchft_ext.errors import CommAbortedError, CommError, CommTimeoutError, PeerLeftError

GRACE = 5.0  # seconds that a backend may be late in telling that an operation's time is over
_VERDICT = 0.25  # seconds that the guard has to tell why a backend's operation failed
_DEATH_IS_TOLD = 0.03  # seconds; of a death where the member has left that was waited for
_OTHER_DEATH_IS_TOLD = 0.1  # seconds; where another one has left: whom it awaited may want that one
_LAST_LIMIT = 1.0  # seconds that operations have to end once a member has begun another generation
_COPY_LIMIT = 60.0  # seconds; of a copy that abort() waits for
_OF_TWO = ("recv", "recv_anysource", "send")
_WITHOUT_FUTURES = _OF_TWO


class Helpers:
    """Threads that wait for works without futures: as many as wait at the same time, kept."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Have none, as in a forked process."""
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a signal's handler may need a helper, too
        self._idle = 0

    def run(self, task: Callable[[], None]) -> None:
        """Run it on a helper. Does not block.

        Raises:
            RuntimeError: no thread is left.
        """
        with self._lock:
            if self._idle > 0:
                self._idle -= 1  # nothing can come between the two lines
                self._tasks.put(task)
                return
        threading.Thread(target=self._work, args=([task],), name="ft-helper", daemon=True).start()

    def _work(self, first: list[Callable[[], None]]) -> None:
        """Take the first task out of the list: the thread's object keeps its arguments."""
        task = first.pop()
        while True:
            task()
            del task  # not held while this one waits
            with self._lock:
                self._idle += 1
            task = self._tasks.get()


helpers = Helpers()
os.register_at_fork(after_in_child=helpers.forget)


def uninterrupted(task: Callable[[], None]) -> None:
    """Run it to its end, whatever handlers of signals raise meanwhile: these run on the main
    thread, where the task is given to a helper. Blocks until the end, or raises what they raise."""
    if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
        return task()
    over, errors = threading.Event(), []

    def run() -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    try:
        helpers.run(run)
    except RuntimeError:  # no thread is left
        return task()
    over.wait()
    if errors:
        raise errors[0]


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


class Operation:
    """What was issued once, for its Work, its future and whoever completes it. Never blocks the
    thread that completes it, but for the copy."""

    def __init__(self, generation: Generation, name: str, staged: Staged, limit: timedelta) -> None:
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
            work.wait(self.limit)
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
        rest = self.began + self.limit.total_seconds() + GRACE - time.monotonic()
        if not self._ended.wait(max(rest, 0.0) if limit is None else limit):
            self._generation.time_is_over(self)
            self._ended.wait(_COPY_LIMIT)
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

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._operation.wait(timeout.total_seconds() if timeout > timedelta(0) else None)
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


class Generation:
    """A generation: members, what is under way, and the failure that ended it."""

    def __init__(self, label: str, guard: _C.Backend) -> None:
        self.rank = guard.rank()
        self.size = guard.size()
        self.failed = threading.Event()
        self.settled = threading.Event()  # failed, or its backend is there
        self.retire: Callable[[], None] = lambda: None  # ends the backend
        self.silence: Callable[[], None] | None = None  # of a backend without copies: its abort
        self._ended = threading.Event()
        self._label = label
        self._guard = guard
        self._number = guard.generation
        self._error: Exception | None = None
        self._leavers: dict[int, Exception] = {}  # by rank: how it left
        self._made = False  # the backend is there
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._issued = 0
        self._copying = 0
        self._in_backend = 0
        self._pending: set[Operation] = set()
        self._watch()

    def _watch(self) -> None:
        """Learn of the guard's failure, and of each member that leaves."""
        arguments = weakref.ref(self), self.new_watch()  # so that a group that nobody holds can go
        threading.Thread(target=_await, args=arguments, name="ft-guard", daemon=True).start()

    def new_watch(self) -> _C._MemberWatch:
        return _C._MemberWatch(self._guard, self._number)

    def watch_ended(self, told: Exception) -> bool:
        """End the generation as the guard says, on the thread that waits for that; False: a member
        has left, and it stands."""
        if self._error is not None:
            return True
        verdict = self._guard.errored()
        if verdict is None and _is_a_leaving(told):
            self._note_leaving(told)
            return False
        self.fail(verdict or told)
        return True

    def _note_leaving(self, told: Exception) -> None:
        """What the member had completed, slower ones still complete."""
        rank = told.cause.rank if isinstance(told, CommError) else None
        with self._lock:
            self._leavers[-1 if rank is None else rank] = told
            waits = bool(self._wanting()) or not self._made
            self._idle.notify_all()
        if not waits:
            return
        try:
            helpers.run(self._let_pending_end)
        except RuntimeError:  # no thread for it
            self._fail_by_leaving(told)

    def backend_made(self) -> None:
        """Note that the backend is there: until then a member that leaves is missed by all."""
        with self._lock:
            self._made = True
            self._idle.notify_all()

    def leaving(self) -> Exception | None:
        """Return how the first member left; None: all are there."""
        with self._lock:
            return next(iter(self._leavers.values()), None)

    def _wanting(self) -> set[Operation]:
        return {one for one in self._pending if one.wanted_of(self._leavers) is not None}

    def _let_pending_end(self) -> None:
        with self._lock:
            pending, made = self._wanting(), self._made
            over = self._idle.wait_for(
                lambda: (
                    self._error is not None
                    or not (self._pending & pending or (not made and not self._made))
                ),
                _LAST_LIMIT,
            )
            leaving = next(iter(self._leavers.values()))
        if not over:
            self._fail_by_leaving(leaving)

    def _fail_by_leaving(self, leaving: Exception) -> None:
        """End it and the backend, so that members which wait for this one in it see that too."""
        self.fail(leaving)
        self.retire()

    def error(self) -> Exception | None:
        return self._error

    def add(self, operation: Operation) -> bool:
        """Take it for the backend; False: refuse() it."""
        with self._lock:
            self._issued += 1
            operation.number = self._issued
            if self._error is not None:
                return False
            self._pending.add(operation)
            self._in_backend += 1
            is_late = operation.wanted_of(self._leavers) is not None
        if is_late:  # the member may have done its part before it left
            with suppress(RuntimeError):  # no thread for it: it has its own limit
                helpers.run(self._let_pending_end)
        return True

    def refuse(self, operation: Operation) -> None:
        """End an operation that was not taken, since the generation has failed."""
        assert self._error is not None
        operation.end(_of(operation, self._error))

    def remove(self, operation: Operation) -> bool:
        """Forget an operation that the backend refused; False: it has ended otherwise."""
        self.backend_ended()
        with self._lock:
            was_pending = operation in self._pending
            self._pending.discard(operation)
        return was_pending

    def backend_ended(self) -> None:
        """Note that the backend is out of one operation."""
        with self._lock:
            self._in_backend -= 1
            self._idle.notify_all()

    def await_backend(self, limit: float) -> None:
        """Block until the backend is in no operation, at most so many seconds."""
        with self._lock:
            self._idle.wait_for(lambda: self._in_backend == 0, limit)

    def begin_copy(self, operation: Operation) -> bool:
        """Say whether the operation still may write the caller's tensors; then end_copy() ends
        that."""
        with self._lock:
            if operation not in self._pending:
                return False
            self._pending.remove(operation)
            self._copying += 1
            self._idle.notify_all()
            return True

    def end_copy(self) -> None:
        with self._lock:
            self._copying -= 1
            self._idle.notify_all()

    def await_copies(self) -> None:
        """Block, after fail(), until nobody writes the caller's tensors: as long as a copy takes.

        Another thread may have been first to fail it, and still be about it.
        """
        self._ended.wait(_COPY_LIMIT)
        with self._lock:
            self._idle.wait_for(lambda: self._copying == 0, _COPY_LIMIT)

    def busy(self) -> int:
        """Return how many operations the backend has not ended, those that failed among them."""
        with self._lock:
            return self._in_backend

    def fail(self, error: Exception) -> None:
        """End it and all that is under way; the first error counts.

        Blocks as long as a backend that works on the caller's tensors takes to leave them.
        """
        if self._error is None:
            uninterrupted(partial(self._fail_whole, error))

    def _fail_whole(self, error: Exception) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            pending, self._pending = self._pending, set()
            self.failed.set()
            self.settled.set()
            self._idle.notify_all()
        if self.silence is not None:
            with suppress(Exception):  # it has no better way to say that it could not
                self.silence()
            self.silence = None  # whoever holds this holds no backend
        for operation in pending:
            operation.end(_of(operation, error))
        self._ended.set()
        for operation in pending:
            operation.tell()

    def abort(self, why: str) -> None:
        """End it on every rank."""
        self._guard.abort(why)
        self.fail(self._guard.errored() or CommAbortedError(why))

    def report(self, operation: Operation, error: Exception) -> None:
        """The backend failed in an operation: find out why, and end the generation. Does not
        block."""
        if _is_late(error):
            self._time_out(operation, str(error))
        else:
            helpers.run(lambda: self._abort_unless_told(operation, error))

    def time_is_over(self, operation: Operation) -> None:
        self._time_out(operation, "")

    def _abort_unless_told(self, operation: Operation, error: Exception) -> None:
        """Whoever died, or else left, is the cause; the guard says so soon. Of another rank's limit
        that one tells, by its guard."""
        culprit = getattr(error, "rank", -1)
        told_elsewhere = culprit not in (-1, self.rank) and "timed out" in str(error)
        patience = GRACE if told_elsewhere else _VERDICT

        with self._lock:
            self._idle.wait_for(lambda: self._error is not None or self._leavers, patience)
            if self._leavers:
                wanted = operation.wanted_of(self._leavers) is not None
                told_within = _DEATH_IS_TOLD if wanted else _OTHER_DEATH_IS_TOLD
                self._idle.wait_for(lambda: self._error is not None, told_within)
            failed = self._error is not None
            leaving = operation.wanted_of(self._leavers) or next(iter(self._leavers.values()), None)
        if failed:
            return
        if leaving is not None:
            self._fail_by_leaving(leaving)
        else:
            self.abort(f"{operation.name} failed in the backend: {error}")

    def _time_out(self, operation: Operation, text: str) -> None:
        elapsed = time.monotonic() - operation.began
        said = f" ({text})" if text else ""
        error = CommTimeoutError(
            f"group '{self._label}' (rank {self.rank}/{self.size}, generation {self._number}): not "
            f"complete after {elapsed:.3f} s{said}; begin a new generation with configure()",
            generation=self._number,
            rank=self.rank,
            size=self.size,
            limit=operation.limit,
        )
        self.fail(error)
        self._guard.abort(f"{operation.name} #{operation.number} on rank {self.rank} timed out")


def _await(generation: weakref.ref[Generation], watch: _C._MemberWatch) -> None:
    while True:
        try:
            watch.wait()
        except Exception as error:
            told = error.with_traceback(None)  # which would hold this frame
        alive = generation()
        if alive is None or alive.watch_ended(told):
            del alive
            return
        watch = alive.new_watch()
        del alive, told  # not held by this thread while it waits


def _peer_in(staged: Staged) -> int:
    """Return the other end of a send or recv; -1: recv from any."""
    named = [value for name, value in staged.kwargs.items() if name in ("dstRank", "srcRank")]
    given = [*staged.args[1:2], *named]
    return given[0] if given and staged.method != "recv_anysource" else -1


def _is_late(error: Exception) -> bool:
    """Say whether this rank's limit ended the operation; torch's gloo has no class for that."""
    if isinstance(error, BackendError):
        return isinstance(error, LateError)
    return "imed out" in str(error) or "imeout" in str(error)


def _is_a_leaving(error: Exception) -> bool:
    cause = error.cause if isinstance(error, CommError) else None
    went_on = cause is not None and "began another generation" in cause.how
    return went_on or isinstance(error, PeerLeftError)


def _of(operation: Operation, error: Exception) -> Exception:
    """Return the error as this operation's: it names it."""
    if not isinstance(error, CommError):
        return error
    text = str(error).replace("group ", f"{operation.name} #{operation.number} on ", 1)
    return type(error)(
        text,
        generation=error.generation,
        rank=error.rank,
        size=error.size,
        cause=error.cause,
        op=operation.name,
        seq=operation.number,
        elapsed=timedelta(seconds=time.monotonic() - operation.began),
        limit=operation.limit,
    )
