"""Goodbyes of processes that multiprocessing starts by fork or forkserver.

They end by os._exit(), without atexit. Only multiprocessing's own finalizers run there, and each
child drops those that it inherited or that were registered before its target began.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing import util

Leave = Callable[[], None]


def at_their_end(leave: Leave) -> None:
    """Have `leave` called in each such process when its target has returned or raised.

    That is before it joins its children and threads.

    Args:
        leave: what lives as long as the process, such as a module's function.
    """
    _register(leave)
    util.register_after_fork(leave, _register)


def _register(leave: Leave) -> None:
    util.Finalize(None, _leave_child, args=(leave, _start_method()), exitpriority=0)


def _start_method() -> str | None:
    """Return how this process was started; asked early, since user code may set the default."""
    own: str | None = getattr(multiprocessing.current_process(), "_start_method", None)
    return own or multiprocessing.get_start_method(allow_none=True)


def _leave_child(leave: Leave, start_method: str | None) -> None:
    # A spawned child has its atexit, which comes when its threads have been joined.
    if multiprocessing.parent_process() is not None and start_method != "spawn":
        leave()
