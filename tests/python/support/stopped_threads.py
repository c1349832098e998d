"""Stops single threads of a child process, as only a debugger can: ptrace(2)."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tasks import thread_names

SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17  # PTRACE_..., sys/ptrace.h
ALL_CHILDREN = 0x40000000  # __WALL: threads too

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _request(what: int, thread: int) -> None:
    if _libc.ptrace(what, thread, None, None) == -1:
        number = ctypes.get_errno()
        if number == errno.ENOSYS:
            number = errno.EPERM
        raise OSError(number, f"ptrace of thread {thread}: {os.strerror(number)}")


@contextmanager
def stopped_threads(pid: int, name: str) -> Iterator[None]:
    """No thread of that process with this name runs in the block, and all others do.

    Enter and leave it on one thread. PermissionError where the machine does not let us.
    """
    stopped: list[int] = []
    try:
        for thread in [task for task, found in thread_names(pid).items() if found == name]:
            _request(SEIZE, thread)
            stopped.append(thread)
            _request(INTERRUPT, thread)
            os.waitpid(thread, ALL_CHILDREN)
        assert stopped, f"process {pid} has no thread {name}"
        yield
    finally:
        for thread in stopped:
            _request(DETACH, thread)
