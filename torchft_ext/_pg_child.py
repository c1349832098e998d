"""A child process in which one generation's engine runs, as its group sees it.

It is started by posix_spawn. The group's process has threads and much memory, and a fork would copy
its page tables and run its fork handlers. Apart from 0 to 2 the child has three descriptors: the
socket of `_pg_frames.py`; the arena's file (not in a child for devices, `_pg_lent.py`); and one
that refers to its parent. By the last one it notices the parent's end even if a fork of the parent
has inherited the other end of the socket. It closes all other descriptors. It is in a process group
of its own, which Ctrl-C does not reach.

Owner: the group, until retire() or kill(). Threads: each child has one, `ft-child`, which reads its
socket, completes operations, and reaps the process. No other thread waits for the process. Requests
about the store run on helpers. All else in any thread.

| state | ends by | what kill() does |
|---|---|---|
| starting | HELLO, which says that it can be configured | ends the process; configure() raises |
| spare | configure() | the same |
| configuring | CONFIGURED | the same |
| live | the end of the stream: generation aborted | the same; operations fail |
| ended | | nothing |

The end of its process, too, leads from each state to `ended`. Then its operations have failed, and
the descriptors, the arena and the process are gone.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchft_ext import _pg_frames as frames
from torchft_ext._pg_arena import Arena, ArenaRoom
from torchft_ext._pg_calls import calls_of
from torchft_ext._pg_frames import Kind, Outcome
from torchft_ext._pg_helpers import helpers
from torchft_ext._pg_operations import (
    GRACE,
    BackendError,
    LateError,
    LostBackendError,
    Operation,
    RefusedError,
    TellingWork,
)
from torchft_ext._pg_staging import Staged

SOCKET, ARENA = 3, 4  # a child's descriptors
_GOODBYE = 1.0  # seconds that a child has for it
_ABOVE = 10  # where descriptors are put before they take their places in the child
_NOTHING = b"\0nothing"  # no key of ours ever holds it
_LOOK_MS = 1000  # how often limits are looked at
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_living: weakref.WeakSet[Child] = weakref.WeakSet()
_starting = threading.RLock()  # no fork inherits the far end of a child that starts


def _nothing() -> None:
    pass


class _Work(TellingWork):
    """Some requests that end as one."""

    def __init__(self, count: int, until: float, when_over: Callable[[], None]) -> None:
        """Make it; `when_over` is called, and let go, once the child has told of all of them."""
        super().__init__()
        self.until = until
        self._when_over = when_over
        self._lock = threading.Lock()
        self._left = count
        self._error: Exception | None = None
        self._source = -1
        self._operation: Operation | None = None

    def tell(self, operation: Operation) -> None:
        with self._lock:
            self._operation = operation
            over = self._left == 0
        if over:
            operation.completed(self._error, self._source)

    def part_ended(self, error: Exception | None, source: int) -> None:
        with self._lock:
            self._left -= 1
            if self._error is None or isinstance(self._error, RefusedError):
                self._error = error or self._error  # a failure is all ranks' matter
            self._source = source
            over = self._left == 0
            operation = self._operation if over else None
        if over:
            when_over, self._when_over = self._when_over, _nothing
            when_over()
        if operation is not None:
            operation.completed(self._error, source)


class Child:
    """One child process, for one generation at most; see above."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start it. Does not wait for it.

        Args:
            command: what to run; this process's id is added.
            environment: of it.

        Raises:
            OSError: it cannot be started.
        """
        self._tell: Callable[[str], None] = lambda text: None
        arena = self._new_arena()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._greeted = False
        self._configured: tuple[bool, str] | None = None
        self._ended: str | None = None
        self._reaped = False
        self._killed = False
        self._silenced = False
        self._has_failed = False  # in an operation, which it may not be out of
        self._store: Store | None = None
        self._size = 1
        self._numbers = itertools.count(1)
        self._works: dict[int, _Work] = {}
        self._leaving = False
        with _starting:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            _sockets.add(self._socket)
            try:
                given = [theirs.fileno(), *([arena.fd] if arena is not None else [])]
                self.pid = _spawned(command, environment, given)
            except BaseException:
                self._socket.close()
                raise
            finally:
                theirs.close()
                if arena is not None:
                    arena.close()
        self._owner = os.getpid()
        try:
            threading.Thread(target=self._run, name="ft-child", daemon=True).start()
        except RuntimeError:  # no thread is left
            self.kill()
            self._reap()
            self._socket.close()
            raise
        _living.add(self)

    def _new_arena(self) -> Arena | None:
        """Make what the child shares of this process's memory from its beginning on."""
        self._arena = Arena()
        return self._arena

    # ---- before the generation stands

    def is_ready(self) -> bool:
        """Say whether it waits for configure(), which then need not wait for it."""
        with self._lock:
            return self._greeted and self._ended is None

    def has_ended(self) -> bool:
        with self._lock:
            return self._ended is not None

    def configure(self, request: frames.Configure, store: Store, limit: timedelta) -> None:
        """Have it join the other members' children. Blocks until it has, or cannot.

        Args:
            request: what it is told.
            store: where it does what the child asks for.
            limit: of waiting.

        Raises:
            LostBackendError: it is gone.
            RuntimeError: the child's reason, or it has not answered in time.
        """
        seconds = limit.total_seconds() + GRACE
        with self._lock:
            self._store, self._size = store, request.size
            self._changed.wait_for(lambda: self._greeted or self._ended is not None, seconds)
        self._send(request.frame())
        with self._lock:
            over = self._changed.wait_for(
                lambda: self._configured is not None or self._ended is not None, seconds
            )
            answer, ended = self._configured, self._ended
        if answer is not None and answer[0]:
            return
        if answer is not None:
            raise RuntimeError(answer[1])
        if not over:
            raise RuntimeError(f"child process {self.pid} did not answer within {seconds:g} s")
        raise LostBackendError(str(ended))

    # ---- operations

    def room(self) -> ArenaRoom:
        """Return room for one operation's copies."""
        return ArenaRoom(self._arena)

    def issue(self, staged: Staged, limit: timedelta) -> dist.Work:
        """Have it do an operation whose copies lie in a room of this child's.

        Blocks where the socket to it is full, so while it reads nothing, and as long as a device's
        driver takes to describe memory; not for the operation.

        Raises:
            ValueError: bad arguments.
            LostBackendError: it is gone, or silence() was called.
        """
        try:
            work = self._sent(staged, limit)
        except BaseException:
            self._not_told()
            raise
        self._told()
        return work

    def _sent(self, staged: Staged, limit: timedelta) -> dist.Work:
        given = [*staged.args, *staged.kwargs.values()]
        calls = calls_of(staged.method, given, self._size, self._span_of)
        requests = [call.issue(next(self._numbers), limit) for call in calls]
        ahead, when_over = self._prepared(given)
        data = b"".join([ahead, *(request.frame() for request in requests)])
        until = time.monotonic() + limit.total_seconds() + 2 * GRACE
        work = _Work(len(requests), until, when_over)
        with self._lock:
            if self._ended is not None:
                raise LostBackendError(self._ended)
            if self._silenced:  # whoever did it has looked at what was under way
                raise LostBackendError(f"its child process {self.pid}: the generation has failed")
            self._works.update((request.number, work) for request in requests)
        self._send(data)
        return work

    def _span_of(self, tensor: torch.Tensor) -> frames.Span:
        """Return where the child finds a tensor."""
        return self._arena.span_of(tensor)

    def _prepared(self, _given: list[Any]) -> tuple[bytes, Callable[[], None]]:
        """Return the frames ahead of an operation on these arguments, and what to call when the
        child is out of it, or has ended."""
        return b"", _nothing

    def _told(self) -> None:
        """What _span_of() and _prepared() gave of an operation has been sent."""

    def _not_told(self) -> None:
        """It will not be sent."""

    def _send(self, data: bytes) -> None:
        with self._sending:
            try:
                self._socket.sendall(data, socket.MSG_NOSIGNAL)
            except OSError:  # it has ended: the reader says so
                pass
            except BaseException:  # of a signal's handler: half a frame may be out
                self.kill()
                raise

    # ---- its end

    def when_ended(self, tell: Callable[[str], None]) -> None:
        """Have `tell` called once, with how it ended: on its thread, or at once if it has."""
        with self._lock:
            ended = self._ended
            if ended is None:
                self._tell = tell
        if ended is not None:
            tell(ended)

    def silence(self) -> None:
        """Give it no more operations, and end it if it is in one. Does not block."""
        if self._is_busy_to_the_last():
            self.kill()

    def _is_busy_to_the_last(self) -> bool:
        """Refuse operations from now on; say whether some are under way."""
        with self._lock:
            self._silenced = True
            return bool(self._works)

    def kill(self) -> None:
        """End it, but not from a fork of its parent. Does not block; another thread reaps it."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._killed = True
            if not self._reaped:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)

    def was_killed(self) -> bool:
        """Say whether it was ended in the midst of what it did."""
        with self._lock:
            return self._killed

    def await_gone(self, limit: float) -> bool:
        """Block until its process has ended, by whatever it had running too, at most so many
        seconds; another thread reaps it. Any thread, the one that reads its socket included.

        Returns:
            Whether it has.
        """
        with self._lock:
            if self._reaped:
                return True
            try:
                fd = os.pidfd_open(self.pid)  # still its own id
            except ProcessLookupError:
                return True
            except OSError:  # a kernel without it, or no descriptor is left
                return self._changed.wait_for(lambda: self._ended is not None, limit)
        try:
            ended = select.poll()
            ended.register(fd, select.POLLIN)
            return bool(ended.poll(limit * 1000))
        finally:
            os.close(fd)

    def drop(self) -> None:
        """End it, and tell nobody: its group is gone, and has said or will say so itself.

        One that is leaving is left to abort().
        """
        self.when_ended(lambda text: None)
        if not self._leaving:
            self.kill()

    def abort(self) -> None:
        """Let it say goodbye, unless it is in an operation; end it. Blocks, a second at most."""
        with self._lock:
            leaves = not self._works and self._configured is not None and not self._killed
            self._leaving = leaves
        if leaves:
            self._send(frames.framed(Kind.QUIT))
            with self._lock:
                self._changed.wait_for(lambda: self._ended is not None, _GOODBYE)
        self.kill()

    # ---- the reader

    def _run(self) -> None:
        why = ""
        try:
            self._read()
        except Exception as error:  # whatever it is, the child is of no use any more
            why = f" ({error})"
        self.kill()
        self._end(f"its child process {self.pid} {self._reap()}{why}")

    def _read(self) -> None:
        inbox = frames.Inbox()
        incoming = select.poll()
        incoming.register(self._socket, select.POLLIN)
        while True:
            while not incoming.poll(_LOOK_MS):
                self._check_limits()
            data = self._socket.recv(1 << 16)
            if not data:
                return
            for kind, payload in inbox.feed(data):
                self._heard(kind, payload)

    def _check_limits(self) -> None:
        """Raise where an operation has not ended long after its limit: nobody may wait for it."""
        with self._lock:
            if any(work.until < time.monotonic() for work in self._works.values()):
                raise OSError("it has not answered long after an operation's limit")

    def _heard(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.DONE:
            self._done(frames.Done.parse(payload))
        elif kind in (Kind.STORE_SET, Kind.STORE_GET, Kind.STORE_REMOVE):
            helpers.run(lambda: self._serve(kind, payload))
        elif kind is Kind.CONFIGURED:
            reader = frames.Reader(payload)
            (outcome,) = reader.fixed(frames.OUTCOME)
            with self._lock:
                if self._store is None or self._configured is not None:
                    raise frames.FrameError("CONFIGURED, which nobody waits for")
                self._configured = outcome == Outcome.GOOD, reader.text()
                self._changed.notify_all()
        elif kind is Kind.HELLO:
            if frames.Reader(payload).fixed(frames.NUMBER) != (frames.VERSION,):
                raise frames.FrameError("another version than this one's")
            with self._lock:
                self._greeted = True
                self._changed.notify_all()
        else:
            raise frames.FrameError(f"{kind.name}, which a child does not send")

    def _done(self, done: frames.Done) -> None:
        with self._lock:
            work = self._works.pop(done.number, None)
            self._has_failed |= done.outcome in (Outcome.TIMED_OUT, Outcome.FAILED)
        if work is None:
            raise frames.FrameError(f"DONE of request {done.number}, which is not under way")
        error: Exception | None = None
        if done.outcome is Outcome.REFUSED:
            error = RefusedError(done.text)
        elif done.outcome is Outcome.TIMED_OUT:
            error = LateError(done.text)
        elif done.outcome is Outcome.FAILED:
            error = BackendError(done.text, done.source)
        work.part_ended(error, done.source)

    def _reap(self) -> str:
        """Wait for the end of the process, which is certain; return how it came."""
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # somebody else reaps this process's children
            found = None
        with self._lock:  # from here on the id may be another's
            self._reaped = True
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        if found is None:
            return "ended"
        if found.si_code == os.CLD_EXITED:
            return f"exited with status {found.si_status}"
        known = {int(one): one.name for one in signal.Signals}
        return f"was ended by {known.get(found.si_status, f'signal {found.si_status}')}"

    def _end(self, text: str) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._sending:  # whoever is in it
            self._socket.close()
        with self._lock:
            self._ended = text
            works, self._works = self._works, {}
            self._store = None
            self._changed.notify_all()
            tell = self._tell
        try:
            tell(text)
        finally:
            for work in works.values():
                with suppress(RuntimeError):  # no thread is left
                    work.part_ended(LostBackendError(text), -1)

    # ---- the store, on helpers

    def _serve(self, kind: Kind, payload: bytes) -> None:
        reader = frames.Reader(payload)
        with self._lock:
            store = self._store
        try:
            (number,) = reader.fixed(frames.NUMBER)
            outcome, values = _answer(store, kind, reader)
            if sum(map(len, values)) > frames.MOST // 2:
                raise ValueError("the values are too long")
        except frames.FrameError:
            return self.kill()
        except Exception as error:
            outcome, values = Outcome.FAILED, [str(error).encode()]
        packed = b"".join(frames.packed_bytes(value) for value in values)
        head = frames.REPLY.pack(number, outcome, len(values))
        self._send(frames.framed(Kind.STORE_REPLY, head + packed))


def _answer(store: Any, kind: Kind, reader: frames.Reader) -> tuple[Outcome, list[bytes]]:
    """Do what a child asks of the store; fewer values than keys: one is missing."""
    if store is None:
        raise RuntimeError("the group has no store any more")
    if kind is Kind.STORE_SET:
        store.set(reader.text(), reader.blob())
        return Outcome.GOOD, []
    if kind is Kind.STORE_REMOVE:
        store.delete_key(reader.text())
        return Outcome.GOOD, []
    (count,) = reader.fixed(frames.NUMBER)
    values: list[bytes] = []
    for key in [reader.text() for _ in range(count)]:
        # get() would wait for what is missing; this answers with what it was given, and sets
        # nothing.
        value = store.compare_set(key, _NOTHING, _NOTHING)
        if value == _NOTHING:
            return Outcome.GOOD, []
        values.append(value)
    return Outcome.GOOD, values


def _spawned(command: Sequence[str], environment: dict[str, str], given: list[int]) -> int:
    """Return the id of a process that has these as descriptors SOCKET, ARENA."""
    moved: list[int] = []
    try:
        for fd in given:  # so that none is in another's place
            moved.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE))
        return os.posix_spawn(
            command[0],
            [*command, str(os.getpid())],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                *((os.POSIX_SPAWN_DUP2, fd, SOCKET + place) for place, fd in enumerate(moved)),
            ],
            setpgroup=0,
            setsigmask=[],
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE],
        )
    finally:
        for fd in moved:
            os.close(fd)


def _forget_in_fork() -> None:
    """Close a forked child's copies, so that the end of its parent is seen."""
    for one in list(_sockets):
        one.close()
    _living.clear()
    _starting.release()


os.register_at_fork(
    before=_starting.acquire,
    after_in_parent=_starting.release,
    after_in_child=_forget_in_fork,
)


def _end_all() -> None:
    """At exit: let those that leave do so, and end the others and their threads."""
    until = time.monotonic() + _GOODBYE
    _join("ft-retire", until)
    for child in list(_living):
        child.when_ended(lambda text: None)
        child.kill()
    _join("ft-child", until + 0.5)


def _join(name: str, until: float) -> None:
    for thread in threading.enumerate():
        if thread.name != name:
            continue
        while thread.ident is None and time.monotonic() < until:  # another thread is starting it
            time.sleep(0.001)
        with suppress(RuntimeError):  # it has not begun even now
            thread.join(max(0.0, until - time.monotonic()))


atexit.register(_end_all)
