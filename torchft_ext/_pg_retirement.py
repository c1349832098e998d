"""The end of old backends, which may take as long as what is under way in them.

Owners: a group (`_pg_guarded.py`) has one Retirement, which owns what it has taken until that is
gone. Threads: any give; one thread, `ft-retire`, ends each.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torchft_ext._pg_generation import Generation
from torchft_ext._pg_making import Formed
from torchft_ext._pg_operations import GRACE


class Retirement:
    """Where old backends go; counts those that are not gone yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Generation, list[Any], float]] = []  # for a thread
        self._ending = 0

    @property
    def count(self) -> int:
        with self._lock:
            return len(self._waiting) + self._ending

    def take(self, formed: Formed, limit: timedelta) -> None:
        """Take its backend, if it has one, to be ended by go_on()."""
        seconds = limit.total_seconds() + GRACE
        with self._lock:
            if backends := formed.backends:
                old = formed.generation, backends, seconds
                # At once: no call, after which a signal's handler could raise, is between the two.
                self._waiting, formed.backends = [*self._waiting, old], []

    def go_on(self) -> None:
        """End on threads what waits: what was taken just now, what there was no thread for, what a
        signal's handler has kept from having one. Does not block."""
        with self._lock:
            count = len(self._waiting)
        for _ in range(count):
            with suppress(RuntimeError):  # no thread is left
                threading.Thread(target=self._end_next, name="ft-retire", daemon=True).start()

    def _end_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            generation, backends, limit = self._waiting.pop(0)
            self._ending += 1
        try:
            generation.await_copies()  # who failed it may still be ending its backend
            if callable(abort := getattr(backends[0], "abort", None)):
                with suppress(Exception):
                    abort()
            generation.await_backend(limit)
            backends.clear()  # torch's destructors wait without the GIL
        finally:
            with self._lock:
                self._ending -= 1
