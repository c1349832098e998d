"""Events for programs that watch: records of Python's loggers, with their values as fields.

Logger and fields of an elastic job's views, commits and errors are named as torchft's Manager names
them, so that what reads its records reads these. All are of level INFO; whatever nobody listens to
costs one look at the logger.

===========================  ====================================================================
logger                       one record for each
===========================  ====================================================================
torchft_quorums              view of an elastic job
torchft_commits              try at a step of an elastic job
torchft_errors               failed generation, and failed attempt at one, that the program met
torchft_ext.generations      generation of a group
===========================  ====================================================================
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

__all__ = ["commit", "failure", "generation", "quorum"]

_quorums = logging.getLogger("torchft_quorums")
_commits = logging.getLogger("torchft_commits")
_errors = logging.getLogger("torchft_errors")
_generations = logging.getLogger("torchft_ext.generations")

_lock = threading.Lock()
_told: deque[tuple[str, int, str]] = deque(maxlen=256)  # failures: group, generation, kind


def quorum(
    member: str, rank: int, number: int, step: int, size: int, phases: dict[str, float]
) -> None:
    """Tell of a view that this process is in; `phases`: seconds of each part of the change."""
    if _quorums.isEnabledFor(logging.INFO):
        fields = _fields(member, rank, number, step)
        text = f"view {number}: {size} members, this one is rank {rank}"
        _quorums.info(text, extra={**fields, "size": size, "phases": phases})


def commit(member: str, rank: int, number: int, step: int, committed: bool) -> None:
    """Tell how a try at a step ended; `number`: of the view."""
    if _commits.isEnabledFor(logging.INFO):
        fields = _fields(member, rank, number, step)
        text = f"step {step} " + ("is committed" if committed else "is repeated")
        _commits.info(text, extra={**fields, "commit_result": committed})


def failure(kind: str, message: str, group: str, number: int, rank: int) -> None:
    """Tell of a failed generation, the first time that the program meets its error."""
    if not _errors.isEnabledFor(logging.INFO) or _is_told(group, number, kind):
        return
    fields = {"job_id": _job_id(), "rank": rank, "quorum_id": number, "error": message}
    _errors.info(message, extra={**fields, "group": group, "cause": kind})


def generation(group: str, number: int, rank: int, size: int) -> None:
    """Tell of a generation that has begun."""
    if _generations.isEnabledFor(logging.INFO):
        fields = {"job_id": _job_id(), "rank": rank, "quorum_id": number}
        text = f"group '{group}': generation {number}: rank {rank} of {size}"
        _generations.info(text, extra={**fields, "group": group, "size": size})


def _is_told(group: str, number: int, kind: str) -> bool:
    """Every wait makes an error of its own of one failure."""
    with _lock:
        known = (group, number, kind) in _told
        if not known:
            _told.append((group, number, kind))
    return known


def _job_id() -> str:
    return os.environ.get("JOB_ID", "unknown")


def _fields(member: str, rank: int, number: int, step: int) -> dict[str, object]:
    names = {"job_id": _job_id(), "replica_id": member}
    return {**names, "rank": rank, "quorum_id": number, "step": step}
