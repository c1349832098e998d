"""Ranks and the store as processes, driven over their standard input and output."""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class MatrixError(AssertionError):
    """A case did not go as the table says."""


class SkippedError(Exception):
    """A case cannot run on this machine; the message says why."""


class RankProcess:
    """One rank. Events are read by a thread of its own; every wait has a deadline.

    Attributes:
        addresses: addresses of its connections, "127.0.0.1:PORT" and, where it is reached by it,
            "unix:NAME" before it.
        liveness_addresses: of its liveness connections.
        incarnation: by which others know its liveness connections.
        transport: how others reach it, "local" or "tcp".
        directory: its working directory, which goes with it; a core is written there by default.
        shared: whether all ranks that start are "local", so that their collectives run in shared
            memory. Else every second one is, and they run over sockets.
    """

    shared = False
    _started = itertools.count()

    def __init__(self, program: Sequence[str], store: str, heartbeat: float) -> None:
        """Start it; program: what it is started by. await_ready() before anything is said to it."""
        # Connections of both kinds in every world: a rank is reached by the first of its addresses.
        local = next(self._started) % 2 == 0 or self.shared
        self.transport = "local" if local else "tcp"
        self._directory = tempfile.TemporaryDirectory(prefix="rank-")
        self.directory = self._directory.name
        self._process = subprocess.Popen(
            [*program, store, str(heartbeat), self.transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.directory,
            env={
                **os.environ,
                "RES_OPTIONS": "timeout:1 attempts:1",  # torch looks its peers' names up
                # Its warnings of a lost store name every frame of a stack, which takes seconds of a core.
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            },
            text=True,
        )
        self._lock = threading.Lock()
        self._ended = False  # guarded by _lock, as is _events
        self._events: dict[str, queue.Queue[Event]] = {}
        threading.Thread(target=self._read, daemon=True).start()
        self.addresses: list[str] = []
        self.liveness_addresses: list[str] = []
        self.incarnation = ""

    def await_ready(self) -> None:
        """Until it takes commands: others may start meanwhile."""
        ready = self.expect("ready", 60)
        self.addresses = ready["addresses"]
        self.liveness_addresses = ready["liveness_addresses"]
        self.incarnation = ready["incarnation"]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            self._of(event["group"]).put(event)
        with self._lock:
            self._ended = True
            for events in self._events.values():
                events.put({"event": "eof"})

    def _of(self, group: str) -> queue.Queue[Event]:
        with self._lock:
            if group not in self._events:
                self._events[group] = queue.Queue()
                if self._ended:
                    self._events[group].put({"event": "eof"})
            return self._events[group]

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def say(self, command: str, group: str = "") -> None:
        """Send one command, to one of its groups; a rank that is gone is not an error here."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((f"@{group} " if group else "") + command + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass

    def expect(self, name: str, seconds: float, group: str = "") -> Event:
        """Wait for that group's next event, which must be the one of that name."""
        event = self.poll(name, seconds, group)
        if event is None:
            raise MatrixError(f"rank (pid {self.pid}) did not say {name!r} within {seconds} s")
        return event

    def poll(self, name: str, seconds: float, group: str = "") -> Event | None:
        """As expect(), but None where it says nothing in that time."""
        try:
            event = self._of(group).get(timeout=seconds)
        except queue.Empty:
            return None
        if event["event"] != name:
            raise MatrixError(f"rank (pid {self.pid}) said {event}, expected {name!r}")
        return event

    def drain(self) -> None:
        """Forget what was said so far."""
        with self._lock:
            for events in self._events.values():
                while not events.empty():
                    events.get_nowait()

    def alive(self) -> bool:
        """Whether the process runs (or is stopped)."""
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal."""
        if self.alive():
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it if it lives and collect it."""
        self.signal(signal.SIGKILL)
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.wait(timeout=30)
        self._directory.cleanup()


_STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class StoreProcess:
    """A TCPStore server in a process of its own, which can be killed and frozen."""

    def __init__(self) -> None:
        """Start it and learn its address."""
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _STORE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._process.stdout is not None
        self.address = f"127.0.0.1:{int(self._process.stdout.readline())}"

    def strike(self, number: int) -> None:
        """Kill or stop the server, and wait until it is killed or stopped.

        Until then some of its threads may go on answering.
        """
        os.kill(self._process.pid, number)
        until = time.monotonic() + 30
        while not self._struck(number):
            if time.monotonic() > until:
                raise MatrixError(f"signal {number} does not reach the store")
            time.sleep(0.001)

    def _struck(self, number: int) -> bool:
        if number == signal.SIGKILL:
            return self._process.poll() is not None
        states = [
            status.read_text().rpartition(")")[2].split()[0]
            for status in Path(f"/proc/{self._process.pid}/task").glob("*/stat")
        ]
        return all(state == "T" for state in states)

    def end(self) -> None:
        """Kill and collect it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(timeout=30)


def monotonic_ns() -> int:
    """The clock of the ranks' time stamps."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
