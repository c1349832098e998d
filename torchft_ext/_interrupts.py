"""Ctrl-C in waits that are torch's own: Python tells the library of it.

Python's wakeup descriptor is one per process. It is taken only where nobody uses it; an event loop
that takes it later keeps it, and Ctrl-C then works in this package's own waits alone.

Whose it is can only be learned by taking it. A user's is put back at once, whatever a signal's
handler raises meanwhile, but with Python's default for `warn_on_full_buffer`. A signal that comes
between the two calls has its handler run, and is not written to the descriptor.
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
