"""The job that this process takes part in, for functions that are not told one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchft_ext.elastic._step import JobLike

_jobs: list[JobLike] = []


def remember(job: JobLike) -> None:
    """Make it the process's job, until another one is."""
    _jobs[:] = [job]


def forget(job: JobLike) -> None:
    """Let the process have no job, if this one was its job."""
    _jobs[:] = [other for other in _jobs if other is not job]


def current() -> JobLike:
    """Return the process's job.

    Raises:
        RuntimeError: there is none.
    """
    if not _jobs:
        raise RuntimeError("this process takes part in no job: call elastic.join(), or name `job`")
    return _jobs[0]
