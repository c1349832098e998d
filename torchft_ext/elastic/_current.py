"""The job that this process takes part in, for functions that are not told one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchft_ext import _C

if TYPE_CHECKING:
    from torchft_ext.elastic._step import JobLike

_jobs: list[JobLike] = []
_told: list[_C._LeaveFlag] = []  # of the run(), or the join(), that is under way


def remember(job: JobLike) -> None:
    """Make it the process's job, until another one is."""
    _jobs[:] = [job]


def forget(job: JobLike) -> None:
    """Let the process have no job, if this one was its job."""
    _jobs[:] = [other for other in _jobs if other is not job]


@contextmanager
def leave_flag() -> Iterator[_C._LeaveFlag]:
    """The flag that leave() sets within this block, or the one of a block around it."""
    if _told:
        yield _told[0]
        return
    _told.append(_C._LeaveFlag())
    try:
        yield _told[0]
    finally:
        _told.clear()


def leave() -> None:
    """Let this process leave its job, also while it is still joining it.

    For handlers of signals, and for other threads: `signal.signal(SIGTERM, lambda *_:
    elastic.leave())`. A join() that waits raises LeftOutError; after it the call is job.leave().
    Nothing happens in a process that has not come to join() or run() yet. Does not block.
    """
    for flag in _told:
        flag.set()
    for job in _jobs:
        job.leave()


def current() -> JobLike:
    """Return the process's job.

    Raises:
        RuntimeError: there is none.
    """
    if not _jobs:
        raise RuntimeError("this process takes part in no job: call elastic.join(), or name `job`")
    return _jobs[0]
