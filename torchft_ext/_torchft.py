"""What torchft's Manager needs to work with groups for the CPU that fail, and with their futures.

Made when ``torchft.manager`` is imported, for all groups: torchft's own need the second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from torchft_ext import _C

MODULE = "torchft.manager"


def functions() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return what stands around torchft's functions; once `MODULE` has been imported."""
    managed: Any = getattr(sys.modules[MODULE], "_ManagedWork", None)
    ours: list[tuple[Any, str, Callable[..., Any]]] = [
        (managed, "_set_future_callback", _set_future_callback),
        (managed, "wait", _wait),
    ]
    known = all(callable(getattr(managed, name, None)) for _, name, _ in ours)
    return ours if known else []  # none: another version's


class _Completed:
    """In place of a Work: its future, which is complete and runs callbacks where they are added."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def get_future(self) -> Future[Any]:
        future: Future[Any] = self._work.get_future()
        if not isinstance(future, _C.Future):
            return future
        completed: Future[Any] = Future()
        completed.set_result(future.wait())
        return completed


def _set_future_callback(theirs: Callable[[Any], None], self: Any) -> None:
    """Have callbacks run where torchft adds them.

    Reason: its callback reads a variable that changes right after the callback was added, so it
    finds the next future's where it runs later, on another thread, as callbacks of this package's
    futures do.
    """
    work = self._work
    self._work = _Completed(work)
    try:
        theirs(self)
    finally:
        self._work = work


def _wait(theirs: Callable[..., bool], self: Any, *args: Any, **kwargs: Any) -> bool:
    """Leave a future behind where the operation failed.

    Reason: torchft's DistributedDataParallel asserts one after wait(), which has handed the failure
    to the Manager and made none.
    """
    succeeded = theirs(self, *args, **kwargs)
    last = self._managed_fut_tail
    if not succeeded and last._fut is None:
        last._fut = Future()
        last._fut.set_result(self._value)
    return succeeded
