"""torchft's groups whose engine runs in a child process: Baby groups.

The same mechanism as `_pg_guarded.py` has for gloo: a guard, copies, a backend for each generation.
The backend is a child process (`_pg_child.py`), and the copies lie in memory that it shares
(`_pg_arena.py`); tensors of a device are lent to it (`_pg_lent.py`).

Owners: a group owns at most one child in a generation and one spare, which has started and waits.
configure() takes the spare, and a thread starts the next one. A child is never configured twice, so
nothing that a library did wrong outlives its generation.

| state of a group | its children |
|---|---|
| new | a spare, that starts |
| configure() is under way | one that joins the other members' children |
| live | one, and a spare |
| failed | the one was killed if it was in an operation, or, NCCL's, failed in one; else it waits |
| shut down | none, once the one has said goodbye, for which it has a second |
| gone | none: they were killed |
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchft_ext import _C
from torchft_ext._pg_child import ARENA, Child
from torchft_ext._pg_frames import Configure
from torchft_ext._pg_generation import Generation
from torchft_ext._pg_guarded import GuardedGroup, backend_place
from torchft_ext._pg_helpers import helpers
from torchft_ext._pg_lent import DeviceStager, LendingChild
from torchft_ext._pg_staging import HEAP, Staged, Stager
from torchft_ext._pg_store import split_address

_HOST_CHILD = Path(__file__).parent / "bin" / "torchft_ext_host_child"
_NCCL_CHILD = Path(__file__).parent / "bin" / "torchft_ext_nccl_child"
_NCCL_LIBRARY = "TORCHFT_EXT_NCCL_LIB"
# What the parent left open for whoever comes is closed before a library opens anything.
_GLOO_CHILD = (
    f"import os; os.closerange({ARENA + 1}, 1 << 20); "
    "from torchft_ext._pg_gloo_child import main; main()"
)
_MILLISECOND = timedelta(milliseconds=1)


class _Children:
    """The children of one group. Threads: any; nothing blocks longer than a process starts."""

    def __init__(self, start: Callable[[], Child]) -> None:
        self._start = start
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._spare: Child | None = None
        self._making: list[Child] = []  # taken; no generation has them
        self._last: Child | None = None  # the last that a generation had
        self._leaving: list[Child] = []  # those before, as far as their processes have not ended
        self._closed = False

    def warm(self) -> None:
        """Start a spare, unless there is one, or close() was called."""
        with self._lock:
            if not self._closed and (self._spare is None or self._spare.has_ended()):
                self._spare = self._start()

    def take(self) -> Child:
        """Return the spare, or a child that starts only now."""
        with self._lock:
            self._closed = False
            spare, self._spare = self._spare, None
            usable = spare is not None and not spare.has_ended()
            taken = spare if spare is not None and usable else self._start()
            self._making.append(taken)
            return taken

    def adopt(self, child: Child) -> None:
        """A generation has it. Others may be in the making, by threads that were left behind."""
        with self._lock:
            before = [*self._leaving, *([self._last] if self._last is not None else [])]
            self._leaving = [one for one in before if not one.has_ended()]
            self._last = child  # now: Ctrl-C may come in the next call
            self._making.remove(child)

    def kill_making(self) -> None:
        """End those that no generation has."""
        with self._lock:
            made, self._making = self._making, []
        for child in made:
            child.kill()

    def killed_and_there(self, limit: float) -> Child | None:
        """Block until the processes of all that were killed have ended, at most so many seconds;
        return one that has not."""
        until = time.monotonic() + limit
        with self._lock:
            known = [*self._leaving, *([self._last] if self._last is not None else [])]
        for child in known:
            if child.was_killed() and not child.await_gone(max(0.0, until - time.monotonic())):
                return child
        return None

    def spare_is_ready(self) -> bool:
        with self._lock:
            return self._spare is not None and self._spare.is_ready()

    def last(self) -> Child | None:
        """Return the last generation's."""
        return self._last

    def drop_spare(self) -> None:
        """End the spare, and have none until take()."""
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill()

    def close(self) -> None:
        """End all of them at once, without a goodbye. Nothing in a fork: locks may be held."""
        if os.getpid() != self._owner:
            return
        self.drop_spare()
        self.kill_making()
        if self._last is not None:
            self._last.drop()


def _warm_again(children: _Children) -> None:
    """Start a spare, on a helper; where that fails now, configure() says why then."""
    with suppress(OSError, RuntimeError, MemoryError):
        children.warm()


class ProcessGroupBaby(GuardedGroup):
    """A group whose engine runs in a child process, which can be killed at any time. Base class.

    Create ProcessGroupBabyHost, ProcessGroupBabyGloo or ProcessGroupBabyNCCL. Compared with the
    classes without "Baby", abort() and configure() take milliseconds whatever an engine or its
    libraries do: the child of an abandoned operation is killed, and a spare that has already
    started takes its place.

    It costs two processes, with 2 or 3 descriptors and one thread for each; two copies of each
    tensor, through shared memory; and a change of processes for each operation. CPU tensors only,
    except for NCCL.

    On failure: as ProcessGroupGloo. If a child ends for any reason, the generation fails on all
    ranks, and the message says how it ended. Children end with their parent. A group cannot be used
    in a forked process.
    """

    _name_of_engine = ""
    _reduce_scatters = False
    _kind_of_child: type[Child] = Child

    def __init__(
        self,
        timeout: float | timedelta = timedelta(seconds=60),
        *,
        options: _C.Options | None = None,
    ) -> None:
        """Make a group without members, and start its first child, without waiting for it.

        Args:
            timeout: of operations and of configure(); seconds, or a timedelta.
            options: options of the guard. The children use the interface, too; a native child also
                uses ports, heartbeat and local sockets.

        Raises:
            NotImplementedError: For NCCL, if this process has no NCCL or no device.
            OSError: If no process can be started.
        """
        self._check_process()
        super().__init__(f"baby-{self._name_of_engine}", timeout, options)
        kind, command, environment = self._kind_of_child, self._command(), self._environment()
        self._children = _Children(lambda: kind(command, environment))
        weakref.finalize(self, self._children.close)
        self._place = ""
        self._network = _C.Options()  # of the children: where the guard listens, and how
        self._children.warm()

    def _check_process(self) -> None:
        """Raise NotImplementedError where a child of this process could not work."""

    def _command(self) -> list[str]:
        """Return what a child runs."""
        return self._unable("engine: make ProcessGroupBabyHost, for example")

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)

    def child_pid(self) -> int | None:
        """Return the id of the generation's child process, or None before the first configure()."""
        last = self._children.last()
        return None if last is None else last.pid

    def num_active_work(self) -> int:
        """Return how many operations of the generation have not ended; 0 before the first."""
        return 0 if self._formed is None else self._formed.generation.under_way()

    def spare_is_ready(self) -> bool:
        """Say whether the next configure() finds a child that has started. Does not block."""
        return self._children.spare_is_ready()

    def _begin(self, store_addr: str, rank: int, world_size: int, within: timedelta | None) -> None:
        self._place = store_addr
        try:
            super()._begin(store_addr, rank, world_size, within)
        finally:
            with suppress(RuntimeError):  # no thread for it: the next configure() starts a child
                helpers.run(partial(_warm_again, self._children))

    def _guard_options(self, store: Store) -> _C.Options:
        """Choose for the guard and the children alike."""
        self._network = _C._network_options(self._options or _C.Options(), store)
        return self._network

    def _words_of_lateness(self, limit: timedelta) -> str:
        return f"timed out after {limit.total_seconds():g} seconds"

    def _backend(
        self, store: Store, rank: int, size: int, timeout: timedelta, attempt: int
    ) -> Child:
        child = self._children.take()
        try:
            child.configure(self._request(rank, size, timeout, attempt), store, timeout)
        except BaseException:
            child.kill()
            raise
        return child

    def _request(self, rank: int, size: int, timeout: timedelta, attempt: int) -> Configure:
        host, port, prefix = split_address(backend_place(self._place, attempt))
        network = self._network
        return Configure(
            rank=rank,
            size=size,
            limit_ms=max(1, timeout // _MILLISECOND),
            heartbeat_ms=(network.heartbeat or timedelta(0)) // _MILLISECOND,
            local_sockets=network.local_sockets is not False,
            store_port=port,
            name=self._label,
            address=network.interface or "",
            ports=network.port_range or "",
            store_host=host,
            prefix=prefix,
        )

    def _adopted(self, generation: Generation, backends: list[Child]) -> None:
        owner, backend = weakref.ref(generation), backends[0]  # retirement kills it
        label = self._label
        self._children.adopt(backend)

        def ended(text: str) -> None:
            alive = owner()
            if alive is not None and alive.error() is None:  # nobody has asked for it
                _C._warn(f"group '{label}' (rank {alive.rank}/{alive.size}): {text}")
                alive.abort(f"rank {alive.rank}: {text}")

        generation.silence = backend.silence
        backend.when_ended(ended)

    def _given_up(self) -> None:
        self._children.kill_making()

    def _stager(self, rank: int, size: int, backend: Any) -> Stager:
        room = HEAP if backend is None else backend.room()
        return Stager(rank, size, True, room, self._reduce_scatters)

    def _begun(self, backend: Any, staged: Staged, limit: timedelta) -> dist.Work:
        work: dist.Work = backend.issue(staged, limit)
        return work

    def shutdown(self) -> None:
        super().shutdown()
        self._children.drop_spare()


class ProcessGroupBabyHost(ProcessGroupBaby):
    """A group for CPU tensors, over this package's own engine in a native child process.

    See ProcessGroupBaby. The child is a small program without Python or torch, and takes a few
    megabytes. It talks to the children of other members. Its parent accesses the store for it.
    """

    _name_of_engine = "host"
    _reduce_scatters = True

    def _command(self) -> list[str]:
        return [str(_HOST_CHILD)]


class ProcessGroupBabyNCCL(ProcessGroupBaby):
    """A group for CUDA tensors, over NCCL in a native child process.

    See ProcessGroupBaby. This class has run on a simulated device only, never on a GPU. The child
    is a program without Python. It takes a few megabytes, and a CUDA context of its own on each
    device in use.

    The child works on the caller's tensors, whose memory it opens by CUDA IPC. Only tensors that
    are not contiguous are copied. Memory of torch's expandable segments raises ValueError, and a
    call during the capture of a CUDA graph raises RuntimeError. Do not call
    torch.cuda.empty_cache() while a generation lives: it may free memory that the child has open,
    which is undefined in CUDA.

    An operation begins after the work that the caller's current stream has so far. wait() blocks
    the calling thread until the result is there, because a stream that waited for a killed child
    would wait for ever. The results of all ranks then count, without a check().

    On failure, abort() and failed operations kill the child and wait until it has ended; until then
    its kernels may write. Waiters wait for at most 40 ms, so that they are released in time, and a
    driver may take longer than that. abort() and configure() wait up to the group's timeout, and
    raise RuntimeError if the child has not ended by then. After a failure the outputs of an
    operation may hold anything, as with ProcessGroupNCCL. Their memory goes back to the allocator
    when the child is gone.
    """

    _name_of_engine = "nccl"
    _kind_of_child = LendingChild

    def _check_process(self) -> None:
        self._device_type = _C._ipc_device_type()

    def _command(self) -> list[str]:
        return [str(_NCCL_CHILD)]

    def _environment(self) -> dict[str, str]:
        found = _place_of("libnccl.so.2")
        return {**({_NCCL_LIBRARY: found} if found else {}), **os.environ}

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self._device_type)]

    def _stager(self, rank: int, size: int, backend: Any) -> Stager:
        return DeviceStager(rank, size, self._device_type)

    def _await_quiet(self, within: timedelta) -> None:
        """Block until all children that were killed are gone.

        Raises:
            RuntimeError: one is not, in time.
        """
        child = self._children.killed_and_there(within.total_seconds())
        if child is not None:
            raise RuntimeError(
                f"'{self._label}': child process {child.pid} was killed and has not ended within "
                f"{within.total_seconds():g} s: its kernels could still write into the tensors of "
                "operations that failed"
            )

    def _abort(self, why: str) -> None:
        """As of every group. Raises RuntimeError where a child's process does not end within the
        group's timeout; the generation has failed all the same."""
        super()._abort(why)
        self._await_quiet(self._timeout)


class ProcessGroupBabyGloo(ProcessGroupBaby):
    """A group for CPU tensors, over torch's gloo in a Python child process.

    See ProcessGroupBaby. The child imports torch, so it takes seconds to start, and some 100 MB of
    memory. That is why there is a spare. It connects to the TCPStore at the address that was passed
    to configure().
    """

    _name_of_engine = "gloo"

    def _command(self) -> list[str]:
        return [sys.executable, "-P", "-c", _GLOO_CHILD]

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        return {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def _place_of(library: str) -> str | None:
    """Return the file that this process has loaded a library from; None: it has not."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = (line.partition("/") for line in lines)
    return next(("/" + rest for _, _, rest in paths if Path(rest).name == library), None)
