"""A pool of rank processes that tests borrow: started once, told what to run, killed and replaced.

Ranks are forked from a process that has imported torch, and live for the whole session.
`Pool.world(n)` begins a fresh generation over n of them; `World.run(function)` runs an importable
function in all of them.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import forked_process
import rankside
import torch.distributed as dist
from forked_process import START_PATIENCE, Request
from rankside import PATIENCE, ErrorInfo


class Hang(AssertionError):
    """A rank did not answer in time. Carries the stacks of all ranks."""


class Died(Exception):
    """A rank process ended while it was asked something."""


class Call:
    """One function under way in one rank."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker = worker
        self.name = name
        self.future: Future[tuple[bool, object]] = Future()

    def outcome(self, patience: float = PATIENCE) -> tuple[bool, object]:
        try:
            return self.future.result(patience)
        except TimeoutError:
            text = f"{self.name} did not end within {patience} s in worker {self.worker.number}"
            raise Hang(text + self.worker.pool.dump_stacks()) from None

    def died(self) -> bool:
        """Whether it ended with its process."""
        try:
            self.outcome()
        except Died:
            return True
        return False

    def failed(self) -> bool:
        if not self.future.done():
            return False
        return self.future.exception() is not None or not self.future.result()[0]

    def value(self, patience: float = PATIENCE) -> object:
        ok, value = self.outcome(patience)
        if not ok:
            assert isinstance(value, ErrorInfo)
            raise AssertionError(f"{self.name} in worker {self.worker.number}:\n{value.traceback}")
        return value

    def error(self, *kinds: str, patience: float = PATIENCE) -> ErrorInfo:
        """The exception that it ended with, which must be one of these kinds."""
        ok, value = self.outcome(patience)
        assert not ok, f"{self.name} returned {value!r} instead of raising {kinds}"
        assert isinstance(value, ErrorInfo)
        assert set(kinds) & set(value.kinds), f"expected {kinds}, got\n{value.traceback}"
        return value


def values_of(calls: Sequence[Call], patience: float = PATIENCE) -> list:
    """What the calls returned. Where one fails and others then hang, the failure is told."""
    limit = time.monotonic() + patience
    while time.monotonic() < limit and not all(call.future.done() for call in calls):
        time.sleep(0.001)
        if any(call.failed() for call in calls):
            limit = min(limit, time.monotonic() + 2)
    for call in calls:
        if call.failed():
            call.value()
    return [call.value(0) for call in calls]


def is_still(pid: int) -> bool:
    """Whether every thread of the process is stopped or has ended."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if thread.read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return False
    return True


def start_behind(
    prefix: Sequence[str], request: Request, connection: Connection
) -> subprocess.Popen:
    """A rank whose interpreter a command starts, in a network of its own for example."""
    program = [sys.executable, "-m", "rank_worker"]
    command = [*prefix, *program, str(connection.fileno()), str(request.dump_path)]
    with open(request.log_path, "wb") as log:
        return subprocess.Popen(
            command,
            pass_fds=[connection.fileno()],
            env=request.env,
            cwd=request.folder,
            stdout=log,
            stderr=log,
        )


class Worker:
    """One rank process and the pipe to it."""

    def __init__(
        self,
        pool: Pool,
        number: int,
        folder: Path,
        env: dict[str, str],
        prefix: Sequence[str] = (),
    ) -> None:
        self.pool = pool
        self.number = number
        self.dump_path = folder / f"worker{number}.stacks"
        self.log_path = folder / f"worker{number}.log"
        self.frozen = False
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._connection, theirs = Pipe()
        request = Request(folder, env, self.log_path, self.dump_path)
        self.process: subprocess.Popen | forked_process.ForkedProcess
        if prefix:
            self.process = start_behind(prefix, request, theirs)
        else:
            self.process = forked_process.start(request, theirs)
        theirs.close()
        threading.Thread(target=self._read_replies, daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def alive(self) -> bool:
        return self.process.poll() is None and not self.frozen

    def busy(self) -> bool:
        with self._lock:
            return bool(self._calls)

    def call(self, function: Callable, args: Sequence, kwargs: dict, where: str = "main") -> Call:
        number = next(self._numbers)
        call = Call(self, f"{function.__module__}.{function.__qualname__}")
        with self._lock:
            self._calls[number] = call
        request = (number, where, function.__module__, function.__qualname__, args, kwargs)
        try:
            self._connection.send(request)
        except OSError:
            self._fail_all()
        return call

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def exit(self) -> int:
        """Let the interpreter end by itself; its exit code."""
        self._connection.send(None)
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            text = f"worker {self.number} did not exit" + self.pool.dump_stacks()
            raise Hang(text) from None

    def freeze(self) -> None:
        """Stop it; returns once no thread of it runs any more."""
        self.frozen = True
        os.kill(self.pid, signal.SIGSTOP)
        rankside.wait_until(lambda: is_still(self.pid), f"worker {self.number} to stop")

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.frozen = False

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def stacks(self) -> str:
        if self.process.poll() is not None or self.frozen:
            return "(ended or frozen)"
        before = self.dump_path.stat().st_size if self.dump_path.exists() else 0
        os.kill(self.pid, signal.SIGUSR1)
        limit, size = time.monotonic() + 3, before
        while time.monotonic() < limit:
            time.sleep(0.2)
            last, size = size, self.dump_path.stat().st_size
            if size == last != before:
                break
        python = self.dump_path.read_text(errors="replace")[before:]
        threads = []
        with suppress(FileNotFoundError, ProcessLookupError):  # the process ends
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                    name, place = (task / "comm").read_text(), (task / "wchan").read_text()
                    threads.append(f"{task.name} {name.strip()}: {place}")
        return python + "\n".join(threads)

    def _read_replies(self) -> None:
        while True:
            try:
                number, ok, value = self._connection.recv()
            except (EOFError, OSError):
                self._fail_all()
                return
            with self._lock:
                call = self._calls.pop(number, None)
            if call is not None:
                call.future.set_result((ok, value))

    def _fail_all(self) -> None:
        with self._lock:
            calls, self._calls = list(self._calls.values()), {}
        how = self._how_it_ended() if calls else ""
        for call in calls:
            if not call.future.done():
                call.future.set_exception(Died(f"{call.name}: worker {self.number} {how}"))

    def _how_it_ended(self) -> str:
        try:
            status = self.process.wait(1)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"ended with status {status}; the end of its log:\n{self.log()[-3000:]}"


class World:
    """Some workers as the ranks of one generation of their default group."""

    def __init__(self, pool: Pool, workers: list[Worker]) -> None:
        self.pool = pool
        self.workers = workers

    @property
    def size(self) -> int:
        return len(self.workers)

    def start(self, rank: int, function: Callable, *args: object, **kwargs: object) -> Call:
        return self.workers[rank].call(function, args, kwargs)

    def run_at_the_end(self, function: Callable) -> None:
        """In all workers that are alive and idle, at once: members wait for each other."""
        idle = [w for w in self.workers if w.alive() and not w.busy()]
        values_of([worker.call(function, (), {}) for worker in idle])

    def start_all(self, function: Callable, *args: object, **kwargs: object) -> list[Call]:
        return [self.start(rank, function, *args, **kwargs) for rank in range(self.size)]

    def run(self, function: Callable, *args: object, **kwargs: object) -> list:
        return values_of(self.start_all(function, *args, **kwargs))

    def on(self, rank: int, function: Callable, *args: object, **kwargs: object) -> object:
        """Run it in one rank, and wait."""
        return self.start(rank, function, *args, **kwargs).value()

    def side(self, rank: int, function: Callable, *args: object, **kwargs: object) -> object:
        """Run it on another thread of the rank, which may be blocked, and wait."""
        return self.start_side(rank, function, *args, **kwargs).value()

    def start_side(self, rank: int, function: Callable, *args: object, **kwargs: object) -> Call:
        return self.workers[rank].call(function, args, kwargs, where="side")

    def start_blocked(self, rank: int, function: Callable, *args: object) -> Call:
        """Start it, and return once it has issued an operation."""
        count = self.side(rank, rankside.operations)
        call = self.start(rank, function, *args)
        self.side(rank, rankside.wait_for_operation_after, count)
        return call

    def next(self, ranks: Sequence[int] | None = None, **options: object) -> World:
        """A new generation of these ranks of this world, in this order, with a new prefix."""
        chosen = range(self.size) if ranks is None else ranks
        return self.pool.generation([self.workers[rank] for rank in chosen], **options)

    def kill(self, rank: int) -> None:
        self.workers[rank].kill()

    def freeze(self, rank: int) -> None:
        self.workers[rank].freeze()

    def thaw(self, rank: int) -> None:
        self.workers[rank].thaw()

    def interrupt(self, rank: int) -> None:
        os.kill(self.workers[rank].pid, signal.SIGINT)


class Pool:
    """Owns the workers and the store under which their generations meet."""

    def __init__(
        self,
        folder: Path,
        env: dict[str, str],
        spares: int = 0,
        host_of: Callable[[int], Sequence[str]] | None = None,
    ) -> None:
        """spares: so many more than were ever borrowed at once are kept ready, from the first that
        is lost on. host_of: gives what stands before the command of the worker of a number, each of
        which then has a host of its own."""
        self._host_of = host_of
        self._spares = spares
        self._borrowed = 0
        self._folder = folder
        self._env = env
        self._workers: list[Worker] = []
        self._numbers = itertools.count()
        self._prefixes = itertools.count()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def address(self) -> str:
        """A store address with a prefix that nobody has used."""
        return f"127.0.0.1:{self._store.port}/test/{next(self._prefixes)}"

    def await_key(self, address: str, name: str) -> None:
        """Until somebody has set this key under the address's prefix."""
        key = f"{address.split('/', 1)[1]}/{name}"
        rankside.wait_until(lambda: self._store.check([key]), f"key {key}")

    def store_keys(self) -> int:
        """How many keys lie in the store now."""
        return self._store.num_keys()

    def borrow(self, count: int, besides: Sequence[Worker] = ()) -> list[Worker]:
        """Living, idle workers; the missing ones are started."""
        free = [w for w in self._workers if w.alive() and not w.busy() and w not in besides]
        while len(free) < count:
            free.append(self._start())
        self._borrowed = max(self._borrowed, count)
        return free[:count]

    def start_spare(self) -> None:
        """Start a worker for the next who borrows, while others are at work."""
        self._start()

    def generation(self, workers: list[Worker], **options: object) -> World:
        address, size = self.address(), len(workers)
        calls = [
            worker.call(rankside.join, (address, rank, size), options)
            for rank, worker in enumerate(workers)
        ]
        values_of(calls, START_PATIENCE)
        return World(self, workers)

    def world(self, size: int, **options: object) -> World:
        return self.generation(self.borrow(size), **options)

    def fresh(self, size: int, backend_name: str = "ft") -> World:
        """A world whose default group was made by init_process_group just now."""
        world = World(self, self.borrow(size))
        address = self.address()
        calls = [
            world.start(rank, rankside.init_fresh, address, rank, size, backend_name)
            for rank in range(size)
        ]
        values_of(calls, START_PATIENCE)
        return world

    def discard_unusable(self) -> None:
        """After each test: workers that are frozen, dead or still busy make room for new ones."""
        for worker in list(self._workers):
            if not worker.alive() or worker.busy():
                worker.kill()
                self._workers.remove(worker)
        if self._spares and len(self._workers) < self._borrowed:
            while len(self._workers) < self._borrowed + self._spares:
                self._start()

    def dump_stacks(self) -> str:
        parts = [
            f"\n=== worker {w.number} (pid {w.pid}):\n{w.stacks()}\n--- its log:\n{w.log()[-3000:]}"
            for w in self._workers
        ]
        return "".join(parts)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _start(self) -> Worker:
        number = next(self._numbers)
        # Worlds of up to two have local connections, larger ones connections of both kinds.
        local = self._host_of is None and number % 4 < 2
        transport = {"TORCHFT_EXT_LOCAL_SOCKETS": "1" if local else "0"}
        prefix = () if self._host_of is None else self._host_of(number)
        worker = Worker(self, number, self._folder, {**self._env, **transport}, prefix)
        self._workers.append(worker)
        return worker
