"""Groups of some members of one view."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from time import monotonic
from typing import TypeVar

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from torchft_ext import _C, _groups, _make_group
from torchft_ext._backends import backends_of

__all__ = ["ViewGroups"]

_T = TypeVar("_T")
_LOOK_AGAIN = timedelta(minutes=1)
_WAKE_WITHIN = timedelta(seconds=2)
_FLUSH_WITHIN = timedelta(milliseconds=50)  # for what a slower member still needs
_OVER = "the view is over"
_TAG = "user:elastic"  # one for all views, since torch keeps tags for ever


class ViewGroups:
    """Groups of some members of one view: made for it, or lasting ones with a generation in it.

    Owner: a Job; one for each view. A thread of its own waits for the view's end, and aborts the
    groups then: a member that waits in a group which has lost nobody is released too. Groups that
    are held end with hold(); what they have sent by then, in a step that was committed, still
    arrives where that takes at most 50 ms. torch's tables know a group that was made until end(),
    not only to the view's end.
    Threads: any; make(), follow(), hold() and end() one at a time.
    """

    def __init__(
        self, store: Store, view: int, backend: str, options: _C.Options, timeout: timedelta
    ) -> None:
        """Begin with no group, and without a thread.

        Args:
            store: the view's.
            view: its number.
            backend: of the groups.
            options: the same.
            timeout: of their operations, and of making one.
        """
        self._store = store
        self._view = view
        self._backend = backend
        self._options = options
        self._timeout = timeout
        self._groups: list[dist.ProcessGroup] = []
        self._lasting: list[tuple[_C.Backend, int]] = []  # and its generation; guarded by _lock
        self._wake = f"wake/{dist.get_rank()}"
        self._lock = threading.Lock()
        self._over: str | None = None  # why the groups were aborted; guarded by _lock
        self._held = False  # guarded by _lock
        self._late = False  # the view ended meanwhile; guarded by _lock
        self._flushed_at = 0.0  # until then, what was sent while held may arrive; guarded by _lock
        self._ended = threading.Event()  # end() was called: nothing is left to abort

    def make(self, name: str, ranks: Sequence[int], *, by_rule: bool = False) -> dist.ProcessGroup:
        """Make a group of these global ranks, in this order; called by them only. Blocks.

        Args:
            name: one that no group of the view has.
            ranks: the members.
            by_rule: the job makes another one in each view, and its failures say so.

        Raises:
            CommError: it could not be formed.
        """
        full = f"view{self._view}/{name}"
        rank = list(ranks).index(dist.get_rank())
        group = _make_group.made_group(
            self._store,
            rank,
            len(ranks),
            backend=self._backend,
            name=full,
            timeout=self._timeout,
            options=copy.copy(self._options),
            beside=(_groups.backend(), list(ranks)),  # so a death is known before it comes here
            by_rule=by_rule,
        )
        _enter(group, full, self._backend, self._store, ranks)
        self._keep(self._groups, group)
        return group

    def follow(
        self, group: dist.ProcessGroup, name: str, ranks: Sequence[int], timeout: timedelta
    ) -> None:
        """Begin a generation of a lasting group, of these global ranks; called by them only.

        Blocks, up to the timeout.

        Raises:
            CommError: it could not be formed.
        """
        rank = list(ranks).index(dist.get_rank())
        for number, backend in enumerate(backends_of(group)):
            store = dist.PrefixStore(f"view{self._view}/{name}/{number}", self._store)
            beside = _groups.backend(), list(ranks)  # as above
            backend._configure_over(store, rank, len(ranks), timeout, *beside)
            self._keep(self._lasting, (backend, backend.generation))
            _groups.follow_generation(backend)

    def backends(self) -> list[_C.Backend]:
        """Return those of all groups."""
        with self._lock:
            groups = list(self._groups)
            lasting = [backend for backend, _ in self._lasting]
        return [backend for group in groups for backend in backends_of(group)] + lasting

    def abort(self, reason: str) -> None:
        """Fail all groups, also those that are still being made."""
        with self._lock:
            self._over = reason
            groups, lasting = list(self._groups), list(self._lasting)
        for group in groups:
            for backend in backends_of(group):
                backend.abort(reason)
        for backend, generation in lasting:  # it may have begun another one by now
            backend._abort_generation(generation, reason)

    @contextmanager
    def hold(self) -> Iterator[Callable[[], None]]:
        """Let groups that lose nobody outlive the view's end within the block.

        The block calls what it is given once it has something to send: no abort then comes within
        50 ms of its end. Else the view's end is not held up.
        """
        committed = threading.Event()
        with self._lock:
            self._held = True
        try:
            yield committed.set
        finally:
            with self._lock:
                self._held = False
                late, self._late = self._late, False
                if committed.is_set():
                    self._flushed_at = monotonic() + _FLUSH_WITHIN.total_seconds()
            if late:
                self._leave()

    def _leave(self) -> None:
        """End the groups of the view with a goodbye: what was sent to slower members arrives.

        An abort may overtake the last bytes of an operation that has succeeded here. Lasting groups
        say such a goodbye when they begin their next generation.
        """
        with self._lock:
            self._over = _OVER
            groups = list(self._groups)
        with ExitStack() as all_of_them:  # also where one raises
            for group in groups:
                for backend in backends_of(group):
                    backend.set_timeout(_FLUSH_WITHIN)
                    all_of_them.callback(backend.shutdown)

    def end(self) -> None:
        """End the groups, and take those that were made out of torch's tables."""
        self._leave()
        self._ended.set()
        self.abort(_OVER)
        with self._lock:
            groups, self._groups = self._groups, []
            self._lasting.clear()
        for group in groups:
            if group in c10d._world.pg_map:  # else the user has destroyed all groups
                dist.destroy_process_group(group)

    def close(self) -> None:
        """End the groups and the thread, also where the view goes on without this member."""
        self.end()
        with suppress(dist.DistStoreError):  # the view is over, and with it the thread
            self._store.set_timeout(_WAKE_WITHIN)  # nobody else uses it any more
            self._store.set(self._wake, "")

    def _keep(self, among: list[_T], one: _T) -> None:
        with self._lock:
            is_first = not self._groups and not self._lasting
            among.append(one)
            over = self._over
        if over is not None:
            self.abort(over)
        elif is_first:
            threading.Thread(
                target=_watch,
                args=(self._store, self._wake, self._on_over),
                name="elastic-view",
                daemon=True,
            ).start()

    def _on_over(self) -> None:
        """Abort the groups; but an abort may overtake what was sent while they were held."""
        while True:
            with self._lock:
                self._late = self._held
                left = self._flushed_at - monotonic()
                if self._held:
                    return
            if left <= 0:
                return self.abort(_OVER)
            self._ended.wait(left)
            if self._ended.is_set():
                return


def _watch(store: Store, wake: str, on_over: Callable[[], None]) -> None:
    """Return once the view is over, or the key is set. At its end the store fails all who wait."""
    while True:
        try:
            return store.wait([wake], _LOOK_AGAIN)
        except dist.DistStoreError as error:
            if not str(error).startswith("wait timeout"):
                return on_over()


def _enter(
    group: dist.ProcessGroup, name: str, backend: str, store: Store, ranks: Sequence[int]
) -> None:
    """Do what new_group() does, which would sort the ranks."""
    world = c10d._world
    own: object = name  # a type of its own since torch 2.13
    group._set_group_name(own)  # type: ignore[arg-type]
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = own  # type: ignore[assignment]
    world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(backend)))
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    world.tags_to_pg.setdefault(_TAG, []).append(group)
    world.pg_to_tag[group] = _TAG
    _distributed_c10d._register_process_group(own, group)  # type: ignore[arg-type]
