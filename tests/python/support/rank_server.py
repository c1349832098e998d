"""Forks rank processes from one that has imported torch and has started no thread.

A fresh interpreter that imports torch costs seconds of CPU, a fork of one milliseconds. What a
rank's environment decides when the library is loaded is decided in the fork: this process has
imported nothing of torchft_ext but the names that `import torch` enters.

Usage: python -m rank_server FD
FD: a socket, over which requests come and answers go (forked_process.py). Ends with it.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

STARTED_WITH = frozenset(os.environ)

import rank_worker  # noqa: E402 - imports torch, which may set variables
from forked_process import LONGEST_REQUEST, Request  # noqa: E402


class Server:
    """The parent of the ranks. Owned by the main thread, the only one; forks never return to it."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._waking, waking_end = os.pipe()
        os.set_blocking(self._waking, False)
        os.set_blocking(waking_end, False)
        self._pipe = (self._waking, waking_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking_end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: whoever asks decides

    def next_rank(self) -> tuple[Request, int] | None:
        """Serve; return in each fork, with what it is to be and its pipe, and at the end None."""
        while True:
            ready, _, _ = select.select([self._control, self._waking], [], [])
            if self._waking in ready:
                with suppress(BlockingIOError):
                    os.read(self._waking, 4096)
                self._tell_who_ended()
            if self._control in ready:
                text, descriptors, _, _ = socket.recv_fds(self._control, LONGEST_REQUEST, 1)
                if not text:
                    return None
                (pipe,) = descriptors
                child = os.fork()
                if child == 0:
                    self._leave()
                    return pickle.loads(text), pipe
                os.close(pipe)
                self._answer("started", child, 0)

    def _tell_who_ended(self) -> None:
        with suppress(ChildProcessError):  # there are none
            while True:
                child, status = os.waitpid(-1, os.WNOHANG)
                if child == 0:
                    return
                self._answer("ended", child, os.waitstatus_to_exitcode(status))

    def _answer(self, what: str, child: int, status: int) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # nobody asks any more
            self._control.send(pickle.dumps((what, child, status)))

    def _leave(self) -> None:
        """What a fork has of this process, it gives back."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for end in self._pipe:
            os.close(end)


def become(request: Request) -> None:
    """Have the folder, the environment and the log that a process started for it would have."""
    os.chdir(request.folder)
    for name in STARTED_WITH - request.env.keys():
        os.environ.pop(name, None)
    os.environ.update(request.env)
    log = os.open(request.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    gc.freeze()  # a collection in a fork would copy the pages of all that is imported
    rank = Server(socket.socket(fileno=int(sys.argv[1]))).next_rank()
    if rank is not None:
        become(rank[0])
        # The interpreter of the fork ends as any other: at the end of this program.
        rank_worker.be_a_rank(Connection(rank[1]), str(rank[0].dump_path))
