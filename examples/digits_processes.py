"""The processes of the demonstration: its workers, and the store at which they meet."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any

Event = dict[str, Any]  # "worker", "event", "time" (CLOCK_MONOTONIC, seconds), and the event's own


class Worker:
    """One child process. A thread reads its lines into the launcher's inbox."""

    def __init__(self, number: int, command: list[str], inbox: queue.SimpleQueue[Event]) -> None:
        self.number = number
        self._stderr: IO[bytes] = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, args=(inbox,), daemon=True)
        self._reader.start()

    def _read(self, inbox: queue.SimpleQueue[Event]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                inbox.put({"worker": self.number, **json.loads(line)})
        self.process.wait()
        inbox.put({"worker": self.number, "event": "ended", "time": time.monotonic()})

    def order(self) -> None:
        """Let it join the job, where it is held; else let it pause in the midst of a step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def errors(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")[-3000:]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._reader.join(timeout=30)
        self._stderr.close()


class Store:
    """A child process that serves a store: python -m torchft_ext.elastic. A context manager."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "torchft_ext.elastic", "--host=127.0.0.1", "--port=0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        told = self.process.stdout.readline()  # "store at port 12345; ..."
        self.port = int(told.split(";")[0].split()[-1])

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
