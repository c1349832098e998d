"""Ctrl-C in torch's own waits: Python notifies the library of it through the wakeup descriptor.

A process has one such descriptor. This package takes it only if it is free. If an event loop takes
it later, the loop keeps it, and Ctrl-C then works only in this package's own waits.

The only way to learn whether it is free is to take it. A user's descriptor is put back immediately,
even if a signal's handler raises meanwhile, with Python's default for `warn_on_full_buffer`. If a
signal comes between the two calls, its handler runs, but its number is not written to the
descriptor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

from torchft_ext import _C

_ours = -1


def watch() -> None:
    """Take the wakeup descriptor if it is free; called whenever a group has been made."""
    global _ours
    if threading.current_thread() is not threading.main_thread():
        return
    with contextlib.suppress(ValueError):  # in a subinterpreter, which gets no signals
        if _free():
            _ours = _C._interrupt_pipe()
            signal.set_wakeup_fd(_ours, warn_on_full_buffer=False)


def _free() -> bool:
    """Take it away if it is ours; say whether nobody has it now."""
    before: list[int] = []
    try:
        # One call of C's notes what the other one returns: handlers of signals raise after either.
        before.extend(map(signal.set_wakeup_fd, (-1,)))
    finally:
        if before and before[0] not in (-1, _ours):
            signal.set_wakeup_fd(before[0])
    return before[0] in (-1, _ours)


def release() -> None:
    """Give the wakeup descriptor back, if it is still ours."""
    global _ours
    with contextlib.suppress(ValueError):
        _free()
    _ours = -1


def _in_forked_child() -> None:
    """Keep the child's signals from being taken for the parent's."""
    if _ours != -1:
        release()


os.register_at_fork(after_in_child=_in_forked_child)
