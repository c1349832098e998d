"""Groups over something that cannot be aborted, a backend or child processes.

Such a backend notices a death late, or never. So each group also has a guard: a native group of
this package with the same members. The guard forms the generation, makes configure() wait until all
members have their backends, notices deaths, and carries abort() to all ranks. Each generation makes
a new backend. The backend works on copies (`_pg_staging.py`), which reach the caller's tensors only
while the generation lives (`_pg_generation.py`).

Owners: the group owns the guard, until shutdown(), and the generation with its backend. While the
backend is being made, the thread that makes it owns it (`_pg_making.py`). When a generation is
over, a thread takes its backend and ends it (`_pg_retirement.py`). The end of a gloo backend waits
for the operations in it, up to their timeouts. `retired()` counts the backends that still wait.

Threads: configure() in one thread at a time; all other methods in any thread, at any time. When
configure() returns, the thread that makes the backend may still be running.

| state of a group | what abort() does |
|---|---|
| new, or after a failed configure() | nothing |
| forming: the guard's configure() | ends it on all ranks: configure() raises |
| forming: the backend is being made | the same; the thread that makes it retires what it gets |
| forming: others make theirs | the same; the backend is retired |
| live | fails the generation on all ranks; releases all waiters; waits for copies in progress |
| failed | nothing |
| shut down | nothing; configure() may follow |

Ctrl-C in configure() does what abort() does while the generation forms. Python may raise
KeyboardInterrupt after any call. So everything that configure() begins belongs to the group before
the call that begins it returns; no frame and no thread is the only one that knows of it. Ctrl-C may
come again. So for a configure() on the main thread, the work after a failure is done by a helper
thread, which waits for it from the beginning (`_pg_turn.py`).
"""

from __future__ import annotations

import itertools
import secrets
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
from torch._C._distributed_c10d import Store

from torchft_ext import _C
from torchft_ext._group_made import group_made
from torchft_ext._pg_arguments import check_place, limit_of
from torchft_ext._pg_base import GroupWithoutBackend, in_torchfts_words
from torchft_ext._pg_generation import Generation
from torchft_ext._pg_making import Formed, Making
from torchft_ext._pg_operations import GRACE, LostBackendError, Operation, StagedWork
from torchft_ext._pg_retirement import Retirement
from torchft_ext._pg_staging import Staged, Stager
from torchft_ext._pg_store import KeptClient, check_meeting_place
from torchft_ext._pg_turn import Turn
from torchft_ext._pg_wrappers import with_operations
from torchft_ext.errors import CommAbortedError, CommError, RendezvousError

_LEAST_FOR_OTHERS = 1.0  # seconds to wait for other members' backends, however late the own one was

_number = itertools.count()


def _retiring(group: GuardedGroup, formed: Formed) -> Callable[[], None]:
    """Return what retires the backend while both are there; it holds neither."""
    owner, what = weakref.ref(group), weakref.ref(formed)

    def retire() -> None:
        alive, still = owner(), what()
        if alive is not None and still is not None:
            alive._retire(still)

    return retire


@with_operations
class GuardedGroup(GroupWithoutBackend):
    """A group over something that cannot be aborted, and a guard; subclasses say over what."""

    def __init__(
        self,
        backend_name: str,
        timeout: float | timedelta,
        options: _C.Options | None,
        copies: bool = True,
    ) -> None:
        """Make a group without members.

        Args:
            backend_name: in errors.
            timeout: of operations and of configure(); seconds, or a timedelta.
            options: of the guard.
            copies: whether operations run on copies.
        """
        super().__init__()
        self._timeout = limit_of(type(self).__name__, timeout)
        self._options = options
        self._backend_name = backend_name
        self._copies = copies
        self._label = f"{type(self).__name__}{next(_number)}"
        self._configuring = threading.Lock()  # of the next one
        self._turn: Turn | None = None  # whoever is in configure()
        self._lock = threading.RLock()  # of the order of operations, and of what follows
        self._guard: _C.Backend | None = None
        self._dropped: weakref.finalize[[_C.Backend], GuardedGroup] | None = None
        self.has_met = False  # whether it has begun to look for the other members
        self._formed: Formed | None = None
        self._forming: Formed | None = None
        self._retirement = Retirement()
        self._client = KeptClient()

    # ---- what subclasses say

    def _backend(self, store: Store, rank: int, size: int, timeout: timedelta, attempt: int) -> Any:
        """Make the backend of a generation; blocks until all members have come.

        `attempt` is alike on all ranks, and another for each; the store's keys lie under it.
        """
        raise NotImplementedError

    def _adopted(self, generation: Generation, backends: list[Any]) -> None:
        """The one backend is the generation's; called once, before any operation, on a helper: a
        traceback of the main thread would hold the backend, which may end with its last owner."""

    def _await_quiet(self, within: timedelta) -> None:
        """Block until no earlier backend can write into the caller's tensors; raise if one still
        can then."""

    def _given_up(self) -> None:
        """configure() has failed, while the backend was being made."""

    def _stager(self, rank: int, size: int, _backend: Any) -> Stager:
        """Return what stages one operation for that backend; None: for one that is gone."""
        return Stager(rank, size, self._copies)

    def _begun(self, backend: Any, staged: Staged, _limit: timedelta) -> dist.Work:
        """Issue a staged operation. Raises what the backend raises."""
        return staged.issue(backend)

    def _guard_options(self, _store: Store) -> _C.Options | None:
        """Return the options of the guard, which meets over that store."""
        return self._options

    # ---- what they share

    def getBackendName(self) -> str:
        return f"ft:{self._backend_name}"

    def retired(self) -> int:
        """Return how many old backends still wait for operations that nobody else waits for."""
        return self._retirement.count

    def _begin(self, store_addr: str, rank: int, world_size: int, within: timedelta | None) -> None:
        check_meeting_place(store_addr)
        check_place(rank, world_size)
        client, timeout = self._client, within or self._timeout

        def form() -> _C.Backend:
            # Only now is it known which way the store lies.
            guard = self._guard or self._new_guard(client.at(store_addr, timeout))
            guard.configure(f"{store_addr}/guard", rank, world_size, timeout=timeout)
            return guard

        self._form(
            form, lambda attempt: client.at(backend_place(store_addr, attempt), timeout), timeout
        )

    def begin_over(self, store: Store, guards_place: Store, rank: int, world_size: int) -> None:
        """Begin the first generation over a store, as init_process_group() does; the guard's
        members meet in a place there. Blocks, and raises, as configure()."""

        def form() -> _C.Backend:
            return self._new_guard(guards_place, rank, world_size, begin_within=self._timeout)

        self._form(
            form, lambda attempt: dist.PrefixStore(f"backend{attempt}", store), self._timeout
        )

    def _new_guard(
        self, store: Store, rank: int = 0, size: int = 1, begin_within: timedelta | None = None
    ) -> _C.Backend:
        """Make the group's guard; with a limit, its first generation too."""
        options = self._guard_options(store)
        self.has_met = True  # from here on the guard tells the other members of what fails
        self._guard = _C._create_backend(  # no frame's: it may have members that wait for it
            store,
            rank,
            size,
            timeout=begin_within or self._timeout,
            engine="host",
            name=self._label,
            options=options,
            may_resize=True,
            begin=begin_within is not None,
        )
        self._dropped = weakref.finalize(self, _tell_dropped, self._guard)
        self._dropped.atexit = False  # then all groups say goodbye
        group_made()
        return self._guard

    def _form(
        self,
        form: Callable[[], _C.Backend],
        store_for: Callable[[int], Store],
        within: timedelta,
    ) -> None:
        """End the last generation, and begin one with the guard that `form` returns."""
        turn = Turn(self._call_off)
        try:
            self._take_turn(turn)
            turn.before = self._generation_of_guard()
            turn.begin()
            self._end("configure() was called")
            self._await_quiet(within)
            self._begin_generation(form(), turn, store_for, within)
        except BaseException as error:
            turn.error = error
            turn.has_failed = True
            raise
        finally:  # no call before over(): it would be open to signals
            if turn.error is None:
                turn.has_succeeded, turn.call_off = True, None
            if not turn.has_begun:
                turn.call_off = None
            if self._turn is turn and (turn.has_succeeded or not turn.has_begun):
                self._turn = self._forming = None
            turn.over()
            turn.await_end()

    def _generation_of_guard(self) -> int:
        guard = self._guard
        return 0 if guard is None else guard.generation

    def _generation_number(self) -> int:
        return self._generation_of_guard()

    def _take_turn(self, turn: Turn) -> None:
        with self._configuring:  # no call in here: a signal's handler would run, and may come here
            other = self._turn
            if other is None:
                self._turn = turn
                return
        ends = "what the last one has begun is still being ended"
        why = ends if other.has_failed else "another thread is in configure()"
        raise RuntimeError(f"configure() on '{self._label}': {why}")

    def _begin_generation(
        self, guard: _C.Backend, turn: Turn, store_for: Callable[[int], Store], within: timedelta
    ) -> None:
        """Add the backend to the guard's generation."""
        generation = Generation(self._label, guard)
        formed = self._forming = Formed(generation)
        self._make_backend(formed, guard, turn, store_for, within)
        generation.retire = _retiring(self, formed)
        formed.making = None  # which holds it
        with self._lock:
            self._formed = formed
        generation.backend_made()
        if generation.error() is not None and generation.leaving() is not None:
            self._retire(formed)

    def _make_backend(
        self,
        formed: Formed,
        guard: _C.Backend,
        turn: Turn,
        store_for: Callable[[int], Store],
        within: timedelta,
    ) -> None:
        """Have the generation's backend made, on all members; raises where one has none in time, or
        the generation fails meanwhile."""
        generation = formed.generation
        timeout, rank, size = self._timeout, generation.rank, generation.size
        # An earlier attempt under this prefix may have left a backend's keys.
        attempt = torch.tensor([secrets.randbits(60)])
        native: Any = guard  # torch's stub of Backend has no operations
        native.broadcast([attempt], _options_of_root(0, within)).wait()

        def make() -> Any:
            number = int(attempt.item())
            store = store_for(number)
            if (given_up := generation.error()) is not None:
                raise given_up
            return self._backend(store, rank, size, timeout, number)

        making = formed.making = Making(make, formed)
        until = time.monotonic() + within.total_seconds()
        making.begin()
        in_time = generation.settled.wait(within.total_seconds() + GRACE)
        made = making.has_made()
        if made:
            turn.run(partial(self._adopted, generation, formed.backends))
            _await_others(generation, guard, until)
        if not made or generation.error() is not None:
            raise self._why_not(generation, making.error if in_time else None, within)

    def _call_off(self, turn: Turn, why: str) -> None:
        """End on all ranks what configure() has begun: the guard's generation, and what is formed
        over it. The turn ends with it, whoever still waits for that."""
        if self._turn is not turn:
            return
        try:
            self._end_what_was_begun(turn, why)
        finally:
            if self._turn is turn:
                self._turn = self._forming = None

    def _end_what_was_begun(self, turn: Turn, why: str) -> None:
        guard, formed = self._guard, self._forming
        error: CommError = CommAbortedError(f"group '{self._label}': configure() {why}")
        try:
            if guard is not None and (begun := guard.generation) != turn.before:
                guard._abort_generation(begun, f"configure() {why}")
                error = guard.errored() or error
        finally:
            if formed is not None:
                formed.generation.fail(error)
                self._leave_behind(formed)
            self._retirement.go_on()

    def _leave_behind(self, formed: Formed) -> None:
        """Have the backend ended, as soon as it is there, that a failed generation was to have."""
        if formed.making is not None:
            formed.making.give_up()
            formed.making = None
        self._retire(formed)
        formed.generation.silence = None  # it may be the backend's
        self._given_up()
        left, self._client = self._client, KeptClient()  # the thread may still wait in that one
        left.forget()

    def _why_not(
        self, generation: Generation, error: Exception | None, within: timedelta
    ) -> Exception:
        """Return what configure() raises where there is no backend; others learn of it."""
        known = generation.error()
        if known is not None:
            return known
        limit = f"it was not there within {within.total_seconds():g} s"
        text = f"'{self._backend_name}' could not be made: {error or limit}"
        generation.abort(text)
        return RendezvousError(
            f"configure() on '{self._label}' (rank {generation.rank}/{generation.size}): {text}",
            rank=generation.rank,
            size=generation.size,
        )

    def _end(self, why: str) -> None:
        """End this rank's part of the generation, and retire its backend."""
        formed = self._formed
        if formed is None:
            return
        formed.generation.fail(CommAbortedError(f"group '{self._label}': {why}"))
        formed.generation.await_copies()
        self._retire(formed)

    def _retire(self, formed: Formed) -> None:
        """End its backend, on a thread; nothing if that is done. Any thread."""
        with self._lock:
            self._retirement.take(formed, self._timeout)
        self._retirement.go_on()

    def _issue(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        formed = self._formed
        if formed is None:
            raise RuntimeError(f"{name} on '{self._label}': expected configure() before")
        generation, backends = formed.generation, formed.backends
        stager = self._stager(generation.rank, generation.size, backends[0] if backends else None)
        staged = stager.stage(name, args, kwargs)
        limit = self._timeout if staged.timeout is None else staged.timeout
        operation = Operation(generation, name, staged, limit)
        with self._lock:  # the backend pairs operations of ranks by their order
            added = generation.add(operation)
            work = self._handed_over(formed, operation, staged) if added else None
        if not added:
            generation.refuse(operation)
        if work is not None:
            operation.follow(work)
        return StagedWork(operation)

    def _handed_over(
        self, formed: Formed, operation: Operation, staged: Staged
    ) -> dist.Work | None:
        """Issue it in the backend; None: the generation or the operation has failed meanwhile.

        Raises:
            RuntimeError, ValueError, TypeError: the backend refused the arguments.
        """
        if operation.has_ended() or not formed.backends:
            formed.generation.backend_ended()
            return None
        try:
            return self._begun(formed.backends[0], staged, operation.limit)
        except Exception as error:
            if not _is_the_networks(error):
                formed.generation.remove(operation)
                staged.room.release()
                raise
            operation.refused(error)
            return None

    def rank(self) -> int:
        return 0 if self._formed is None else self._formed.generation.rank

    def size(self) -> int:
        return 1 if self._formed is None else self._formed.generation.size

    def errored(self) -> Exception | None:
        error = None if self._formed is None else self._formed.generation.error()
        return None if error is None else in_torchfts_words(error)

    def _abort(self, why: str) -> None:
        guard, forming, formed = self._guard, self._forming, self._formed
        if guard is None:
            return
        guard.abort(why)
        error = guard.errored() or CommAbortedError(f"group '{self._label}': {why}")
        if forming is not None:
            forming.generation.fail(error)
        if formed is not None:
            formed.generation.fail(error)
            formed.generation.await_copies()

    def shutdown(self) -> None:
        self._end("shutdown() was called")
        try:
            if self._guard is not None:
                self._guard.shutdown()
        finally:
            self._guard = None
            if self._dropped is not None:
                self._dropped.detach()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout = limit_of("set_timeout", timeout)
        formed = self._formed
        for group in formed.backends if formed is not None else []:
            with suppress(RuntimeError, AttributeError):  # a backend without timeouts
                group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)


def _tell_dropped(guard: _C.Backend) -> None:
    """The group is gone, without shutdown(). Its guard, which is idle, would only say goodbye."""
    with suppress(RuntimeError):  # in a forked child
        guard.abort("its group object was destroyed")


def backend_place(store_addr: str, attempt: int) -> str:
    """Return where a backend's keys lie, below the place that configure() was given."""
    return f"{store_addr}/backend{attempt}"


def _await_others(generation: Generation, guard: _C.Backend, until: float) -> None:
    """Block until all members have their backends, so that none has left when another one still
    connects to it; where one has not, the generation fails."""
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=max(until - time.monotonic(), _LEAST_FOR_OTHERS))
    native: Any = guard
    try:
        native.barrier(options).wait()
    except CommError as error:
        generation.fail(guard.errored() or error)


def _is_the_networks(error: Exception) -> bool:
    """Say whether it tells of a connection, and not of arguments; gloo has no class for it."""
    lost = isinstance(error, (dist.DistError, LostBackendError))
    return lost or "gloo/transport" in str(error)


def _options_of_root(root: int, within: timedelta) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = root
    options.timeout = within
    return options
