"""One generation of a group over a backend that cannot be aborted, and the failure that ends it.

Owners: the group (`_pg_guarded.py`) owns its generation; a generation owns its operations
(`_pg_operations.py`) until they have ended. The guard, a native group of this package, reports
which members died or left. It belongs to the group and outlives generations.

Threads: any. One thread for each generation, `ft-guard`, waits for the guard's failure, and holds
the generation only while it handles a report. Helpers (`_pg_helpers.py`) wait for operations that
may still succeed, and fail them otherwise.

When a member leaves or begins another generation, this generation continues until an operation that
needs that member fails: in the backend, or after a second. Pending and later operations have that
time because the member may already have completed its part; messages among other members continue.
A failed generation accepts no operations. Completions that come later are dropped: this keeps an
abandoned operation out of the caller's tensors.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

from torchft_ext import _C
from torchft_ext._pg_helpers import helpers, uninterrupted
from torchft_ext._pg_operations import COPY_LIMIT, GRACE, BackendError, LateError, Operation
from torchft_ext.errors import CommAbortedError, CommError, CommTimeoutError, PeerLeftError

_VERDICT = 0.25  # seconds that the guard has to tell why a backend's operation failed
_DEATH_IS_TOLD = 0.03  # seconds; of a death where the member has left that was waited for
_OTHER_DEATH_IS_TOLD = 0.1  # seconds; where another one has left: whom it awaited may want that one
_LAST_LIMIT = 1.0  # seconds that operations have to end once a member has begun another generation


class Generation:
    """A generation: members, what is under way, and the failure that ended it; an Owner of its
    operations, which says what some of the methods promise."""

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
        self._lock = threading.RLock()  # whose owner is known
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
        self.backend_ended()
        with self._lock:
            was_pending = operation in self._pending
            self._pending.discard(operation)
        return was_pending

    def backend_ended(self) -> None:
        with self._lock:
            self._in_backend -= 1
            self._idle.notify_all()

    def await_backend(self, limit: float) -> None:
        """Block until the backend is in no operation, at most so many seconds."""
        with self._lock:
            self._idle.wait_for(lambda: self._in_backend == 0, limit)

    def begin_copy(self, operation: Operation) -> bool:
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
        if self._is_interrupted():
            return
        self._ended.wait(COPY_LIMIT)
        with self._lock:
            self._idle.wait_for(lambda: self._copying == 0, COPY_LIMIT)

    def busy(self) -> int:
        """Return how many operations the backend has not ended, those that failed among them."""
        with self._lock:
            return self._in_backend

    def under_way(self) -> int:
        """Return how many operations have not ended."""
        with self._lock:
            return len(self._pending) + self._copying

    def fail(self, error: Exception) -> None:
        """End it and all that is under way; the first error counts.

        Blocks as long as a backend that works on the caller's tensors takes to leave them; in a
        signal's handler that has come in between what is done under the lock, not at all.
        """
        if self._error is not None:
            return
        if self._is_interrupted():
            helpers.run(partial(self._fail_whole, error))  # once the lock is free
        else:
            uninterrupted(partial(self._fail_whole, error))

    def _is_interrupted(self) -> bool:
        """This thread has the lock: a signal's handler runs in it."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

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
