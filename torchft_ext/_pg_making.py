"""A generation's backend while it is being made.

Owners: the group (`_pg_guarded.py`) owns the backend that was made, with the generation. Until then
a thread, `ft-make`, owns the backend, one thread for each; it ends the backend if it is no longer
wanted. Threads: the group's configure() begins the making. It, or the helper that ends a failed
configure(), may give it up. In a forked child all backends belong to the parent. The child keeps
them until its end, because the destructors of torch's gloo join threads that the child does not
have.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torchft_ext._pg_generation import Generation


class Formed:
    """A generation and its backend; the one that makes that, until it is there."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.making: Making | None = None
        self.backends: list[Any] = []  # empty until it is there, and once it is retired


_made: weakref.WeakSet[Any] = weakref.WeakSet()  # all backends, retired ones too


def _keep_in_fork() -> None:
    """Leak the parent's backends: a list in a module would end with the child's interpreter."""
    for backend in _made:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


os.register_at_fork(after_in_child=_keep_in_fork)


class Making:
    """A backend being made on a thread, which lets it go again if nobody wants it any more."""

    def __init__(self, make: Callable[[], Any], formed: Formed) -> None:
        """Say what begin() makes, and who is to have it."""
        self.error: Exception | None = None
        self._make = make
        self._formed = formed
        self._lock = threading.Lock()
        self._given_up = False

    def begin(self) -> None:
        """Begin; the generation is told, on the thread, when it has ended."""
        threading.Thread(target=self._run, name="ft-make", daemon=True).start()

    def _run(self) -> None:
        try:
            made = self._make()
            _made.add(made)
            with self._lock:
                unwanted = self._given_up
                if not unwanted:
                    self._formed.backends = [made]
            if unwanted:
                _let_go(made)
        except Exception as error:
            self.error = error.with_traceback(None)  # whose frames have the store
        self._formed.generation.settled.set()

    def has_made(self) -> bool:
        """Say whether it is there; if not, nobody will have it."""
        with self._lock:
            self._given_up = not self._formed.backends
            return not self._given_up

    def give_up(self) -> None:
        """Have the thread end what is not there yet."""
        with self._lock:
            self._given_up = True


def _let_go(made: Any) -> None:
    """End what has an end of its own beside its destructor."""
    kill = getattr(made, "kill", None)
    if callable(kill):
        kill()
