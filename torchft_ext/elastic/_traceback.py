"""What an uncaught exception's traceback is marked with: the process's rank in the newest view."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import TracebackType

__all__ = ["RankedTraceback"]

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class RankedTraceback:
    """A sys.excepthook in place of the one that torch installs with a default group.

    torch's marks each line with the rank that the group had at its begin. That is 0 in every
    process of an elastic job, whatever it is later. This one has the rank of the newest view;
    before the first it marks nothing.

    Owner: the interpreter, from install() on. Threads: any.
    """

    def __init__(self, before: Hook) -> None:
        """The hook that writes the traceback."""
        self.rank: int | None = None
        self._before = before

    @classmethod
    def install(cls, before: Hook) -> RankedTraceback:
        """Make it the process's. before: the one of before the group was made; one of a job that
        this process was in earlier is taken again.
        """
        hook = before if isinstance(before, cls) else cls(before)
        hook.rank = None
        sys.excepthook = hook
        return hook

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Write the traceback to stderr."""
        if self.rank is None:
            self._before(kind, error, traceback)
            return
        stderr, buffer = sys.stderr, io.StringIO()
        sys.stderr = buffer
        try:
            self._before(kind, error, traceback)
        finally:
            sys.stderr = stderr
        lines = buffer.getvalue().split("\n")
        stderr.write("\n".join(f"[rank{self.rank}]: {line}" if line else "" for line in lines))
        stderr.flush()
