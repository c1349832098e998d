"""One configure() of a group, and the end of what it has begun where it fails.

Handlers of signals raise on the main thread, after any call, and again while it deals with that.
So a helper waits for the end of a configure() of that thread from the beginning, and ends what was
begun. The main thread does one call for it, over(), of which no signal can keep it.

Owner: the frame of configure(), and the helper until that is over. Threads: the one that is in
configure(), and the helper.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

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
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self.over = self._under_way.release  # of C's: no handler of a signal runs before it
        self._whole = threading.Lock()  # of what is done whole, or not at all
        self._is_attended = False
        self._is_ended = False
        self._ended = threading.Event()

    def begin(self) -> None:
        """Have a helper wait for over(), where signals may come."""
        if threading.current_thread() is threading.main_thread() and not sys.is_finalizing():
            with suppress(RuntimeError):  # no thread is left
                helpers.run(self._attend)
                self._is_attended = True
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
                why = f"failed: {error}" if isinstance(error, Exception) else "was interrupted"
                del error  # which has the frames of configure()
                call_off(self, why)
        finally:
            self._ended.set()

    def await_end(self) -> None:
        """After over(): block until what was begun is called off, if that is to be."""
        if self.has_succeeded:
            return
        if self._is_attended:
            self._ended.wait()
        elif self.has_begun:
            self._end()
        else:
            self.error = None

    def run(self, task: Callable[[], None]) -> None:
        """Run it whole, unless the turn has ended; a failed turn ends after it."""
        uninterrupted(partial(self._run, task))

    def _run(self, task: Callable[[], None]) -> None:
        with self._whole:
            if not self._is_ended:
                task()
