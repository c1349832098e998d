"""One configure() of a group, and the end of what it has begun where it fails.

Handlers of signals raise on the main thread, after any call, and again while it handles the first
one. So for a configure() on the main thread, a helper waits from the beginning for its end, and
ends everything that was begun. The main thread makes a single call for that, over(), which no
signal can prevent.

Owners: the group, until the turn has ended; the frame of configure(); and the helper. After a
second Ctrl-C the frame is gone and the helper is left. Threads: the one that is in configure(), and
the helper.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from torchft_ext import _C
from torchft_ext._pg_helpers import helpers, uninterrupted


class Turn:
    """Of one configure()."""

    def __init__(self, call_off: Callable[[Turn, str], None]) -> None:
        """Make it.

        Args:
            call_off: ends what was begun, told why. From begin() on it is called, once, where
                over() finds an error.
        """
        self.before = 0  # the guard's generation
        self.error: BaseException | None = None
        self.call_off: Callable[[Turn, str], None] | None = call_off
        self.has_begun = False
        self.has_succeeded = False
        self.has_failed = False  # and is being called off, if it had begun
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self.over = self._under_way.release  # of C's: no handler of a signal runs before it
        self._whole = threading.Lock()  # of what is done whole, or not at all
        self._attended_in = 0  # the process whose helper waits
        self._is_ended = False
        self._ended = threading.Event()

    def begin(self) -> None:
        """Have a helper wait for over(), where signals may come."""
        if threading.current_thread() is threading.main_thread() and not sys.is_finalizing():
            with suppress(RuntimeError):  # no thread is left
                helpers.run(self._attend)
                self._attended_in = os.getpid()
        self.has_begun = True

    def _attend(self) -> None:
        self._under_way.acquire()
        self._end()

    def _end(self) -> None:
        try:
            with self._whole:
                self._is_ended = True
                error, self.error = self.error, None
                call_off, self.call_off = self.call_off, None
                if error is None or call_off is None:
                    return
                why = _what_of(error)
                del error  # which has the frames of configure()
                call_off(self, why)
        except Exception as error:  # configure() raises its own
            _C._warn(f"torchft_ext: the end of a configure() that failed: {_what_of(error)}")
        finally:
            self._ended.set()

    def await_end(self) -> None:
        """After over(): block until what was begun is called off, if that is to be."""
        if self.has_succeeded:
            return
        if self._attended_in == os.getpid():
            self._ended.wait()
        elif self.has_begun and not self._attended_in:
            self._end()
        else:  # nothing has begun; or this is a fork, in which nothing is this process's
            self.error = self.call_off = None

    def run(self, task: Callable[[], None]) -> None:
        """Run it whole, unless the turn has ended; a failed turn ends after it."""
        uninterrupted(partial(self._run, task))

    def _run(self, task: Callable[[], None]) -> None:
        with self._whole:
            if not self._is_ended:
                task()


def _what_of(error: BaseException) -> str:
    """Say what became of configure()."""
    if not isinstance(error, Exception):
        return "was interrupted"
    try:
        return f"failed: {error}"
    except Exception:  # the program's own
        return f"failed: {type(error).__name__}"
