"""Processes that rank_server.py forks, as whoever asked for them sees them."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

LONGEST_REQUEST = 1 << 17  # bytes; an environment of a few kilobytes, and paths
START_PATIENCE = 100.0  # seconds; importing torch takes some of them, on a busy machine many
SERVER_IS_GONE = -signal.SIGKILL  # taken for the status of whom nobody watches any more


@dataclass(frozen=True)
class Request:
    """What a rank process is started with."""

    folder: Path
    env: dict[str, str]
    log_path: Path  # its stdout and stderr
    dump_path: Path  # where its stacks go


class ForkedProcess:
    """A process that is no child of this one: as much of subprocess.Popen as a pool needs.

    Owned by whoever asked for it; its status is set by the server's reader, once.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        if self._status is None:
            with suppress(ProcessLookupError):  # it has ended, and the server will say so
                os.kill(self.pid, signal.SIGKILL)

    def ended_with(self, status: int) -> None:
        self._status = status
        self._ended.set()


class RankServer:
    """The process that forks, one for all pools of this process; ends with it."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._log_path = folder / "rank_server.log"
        # Messages, each whole or not at all.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "rank_server", str(theirs.fileno())]
        with open(self._log_path, "wb") as log:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=env, cwd=folder, stdout=log, stderr=log
            )
        theirs.close()
        self._started: queue.SimpleQueue[ForkedProcess | None] = queue.SimpleQueue()
        self._asking = threading.Lock()
        threading.Thread(target=self._read_answers, daemon=True).start()

    def start(self, request: Request, connection: Connection) -> ForkedProcess:
        with self._asking, suppress(BrokenPipeError, queue.Empty):
            socket.send_fds(self._control, [pickle.dumps(request)], [connection.fileno()])
            process = self._started.get(timeout=START_PATIENCE)
            if process is not None:
                return process
        text = f"the server of ranks started none, its status: {self._process.poll()}\n"
        raise AssertionError(text + self._log_path.read_text()[-3000:])

    def _read_answers(self) -> None:
        alive: dict[int, ForkedProcess] = {}
        while answer := self._next_answer():
            what, pid, status = pickle.loads(answer)
            if what == "started":
                alive[pid] = ForkedProcess(pid)
                self._started.put(alive[pid])
            else:
                alive.pop(pid).ended_with(status)
        for process in alive.values():
            process.ended_with(SERVER_IS_GONE)
        self._started.put(None)

    def _next_answer(self) -> bytes:
        """Empty at the end."""
        try:
            return self._control.recv(4096)
        except OSError:
            return b""


_server: RankServer | None = None


def start(request: Request, connection: Connection) -> ForkedProcess:
    """A rank at the other end of this connection, whose own end the caller closes."""
    global _server
    if _server is None:
        _server = RankServer(request.folder, request.env)
    return _server.start(request, connection)
