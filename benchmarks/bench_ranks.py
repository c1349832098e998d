"""Processes for the benchmarks: started by exec, spoken to in lines of JSON.

The launcher hosts the store and holds a `Pool`; every rank is the benchmark's own script, started
anew with `--rank-process`. A rank reads commands from its stdin (`commands()`) and answers on its
stdout (`reply()`). Every wait of the launcher has a limit, and no process outlives its pool.

Most benchmarks ask a world once: `run_world()` in the launcher, `answer()` in its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
import torch.distributed as dist
from bench_hosts import SecondHost

RANK_FLAG = "--rank-process"
Message = dict[str, Any]


class RankFailed(RuntimeError):
    """A rank ended too early, with an error, or did not answer in time."""


class RankProcess:
    """One rank's process, for the launcher's main thread; a thread reads its answers."""

    def __init__(self, pool: Pool, env: dict[str, str], host: SecondHost | None) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()
        command = [sys.executable, pool.script, RANK_FLAG]
        if host is not None:
            command, env = host.command(command), {**env, "GLOO_SOCKET_IFNAME": host.far}
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=env,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self._reader = threading.Thread(target=self._read, args=(pool.inbox,), daemon=True)
        self._reader.start()

    def send(self, cmd: str, **fields: object) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps({"cmd": cmd, **fields}) + "\n")
        self._popen.stdin.flush()

    def signal(self, number: int) -> float:
        """Send a signal; return the time just before, on the clock that all processes share."""
        when = time.monotonic()
        os.kill(self.pid, number)
        return when

    def wait(self, limit_s: float) -> int | None:
        """Its exit status; None when it still runs at the limit."""
        try:
            return self._popen.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Kill it if it still runs (also when stopped), with all that it started, and reap it.

        torchft's children outlive a parent that is killed, and would keep the pipe open.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait(timeout=30)
        self._reader.join(timeout=30)
        for stream in (self._popen.stdin, self._popen.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def errors(self) -> str:
        """The last of what it wrote to stderr."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")[-2000:]

    def _read(self, inbox: queue.SimpleQueue[tuple[RankProcess, Message]]) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if line.startswith("{"):
                inbox.put((self, json.loads(line)))
        inbox.put((self, {"event": "ended"}))


class Pool:
    """The launcher's side: a store server, and the processes that use it. A context manager."""

    def __init__(
        self, script: str, env: dict[str, str] | None = None, second: SecondHost | None = None
    ) -> None:
        self.script = script
        self._second = second
        self._host = "127.0.0.1" if second is None else second.address
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo") if second is None else second.near
        self.store = dist.TCPStore(
            self._host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.inbox: queue.SimpleQueue[tuple[RankProcess, Message]] = queue.SimpleQueue()
        self._processes: list[RankProcess] = []
        self._env = {
            **os.environ,
            # One thread per rank: ranks share the cores. One interface for both libraries.
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": interface,
            "BENCH_STORE": self.address,
            **(env or {}),
        }

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.end()

    @property
    def address(self) -> str:
        """The store's, as configure() takes it, without a prefix."""
        return f"{self._host}:{self.store.port}"

    def start(self, count: int, elsewhere: bool = False) -> list[RankProcess]:
        """Start ranks; elsewhere: on the second host, where there is one."""
        host = self._second if elsewhere else None
        started = [RankProcess(self, self._env, host) for _ in range(count)]
        self._processes += started
        return started

    def drop(self, process: RankProcess) -> None:
        """End a process and forget it; what it still said is thrown away by gather()."""
        self._processes.remove(process)
        process.end()

    def gather(self, processes: list[RankProcess], event: str, limit_s: float) -> list[Message]:
        """Wait for this event from each of the processes; the answers in their order.

        Raises RankFailed when one of them ends first, or is late.
        """
        answers: dict[RankProcess, Message] = {}
        deadline = time.monotonic() + limit_s
        while len(answers) < len(processes):
            try:
                sender, message = self.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = [p.pid for p in processes if p not in answers]
                raise RankFailed(
                    f"no {event!r} from processes {late} within {limit_s:g} s"
                ) from None
            if sender not in processes:
                continue
            if message["event"] == "ended":
                time.sleep(1)  # others may be about to fail for the same reason
                said = "\n".join(f"process {p.pid}: {p.errors()}" for p in processes)
                raise RankFailed(f"process {sender.pid} ended; awaited {event!r}\n{said}")
            if message["event"] == event:
                answers[sender] = message
        return [answers[p] for p in processes]

    def finish(self, processes: list[RankProcess]) -> None:
        """Ask the processes to leave; raise RankFailed when one does not, or fails."""
        for process in processes:
            process.send("quit")
        for process in processes:
            status = process.wait(30)
            if status != 0:
                raise RankFailed(f"process {process.pid} left with {status}\n{process.errors()}")


def run_world(script: str, world: int, limit_s: float, **fields: object) -> list[Message]:
    """Start a world, have each rank measure once, and end it. The ranks' answers, in their order.

    Each rank gets these fields, its rank, the world's size and the store's address.
    """
    with Pool(script) as pool:
        processes = pool.start(world)
        for rank, process in enumerate(processes):
            process.send("run", rank=rank, world=world, address=pool.address, **fields)
        answers = pool.gather(processes, "measured", limit_s)
        pool.finish(processes)
    return answers


def answer(measure: Callable[[Message], Message]) -> int:
    """In a rank: answer the commands of run_world(). Returns the exit status."""
    for command in commands():
        reply("measured", **measure(command))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def time_calls(call: Callable[[], object], count: int) -> list[float]:
    """In a rank: the seconds of each of so many calls, one after the other."""
    times = []
    for _ in range(count):
        start = time.monotonic()
        call()
        times.append(time.monotonic() - start)
    return times


def connect_store() -> dist.TCPStore:
    """A rank's client to the launcher's store."""
    host, port = os.environ["BENCH_STORE"].split(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=60))


def commands() -> Iterator[Message]:
    """The launcher's commands, until it closes the pipe or says "quit"."""
    for line in sys.stdin:
        message: Message = json.loads(line)
        if message["cmd"] == "quit":
            return
        yield message


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def hold_memory(resident: int) -> torch.Tensor:
    """With it, this process has at least so many resident bytes."""
    return torch.ones(max(0, resident - resident_bytes()), dtype=torch.uint8)


def reply(event: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def progress(text: str) -> None:
    """A line for the person who waits."""
    print(text, file=sys.stderr, flush=True)
