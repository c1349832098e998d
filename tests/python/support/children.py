"""Forked children of a rank, each of which ends within a limit or is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable

from rankside import failure_of

CHILD_LIMIT = 20.0  # seconds; a child that takes longer hangs


def wait_for(child: int) -> int | None:
    """Its exit status; None: it hung, and was killed."""
    limit = time.monotonic() + CHILD_LIMIT
    while time.monotonic() < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def end_of_child(end: Callable[[], object]) -> int:
    """Exit status of a child that does this; what it raises ends its interpreter."""
    child = os.fork()
    if child == 0:
        end()
        sys.exit(0)
    status = wait_for(child)
    assert status is not None, "the child hung"
    return status


def answers_of_child(actions: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What becomes of each action in a child, one after the other: "returned", or the error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for name, action in actions.items():
                error = failure_of(action)
                answer = "returned" if error is None else f"{error.type}: {error.text}"
                os.write(writing, (json.dumps([name, answer]) + "\n").encode())
        finally:
            os._exit(0)
    os.close(writing)
    status = wait_for(child)
    with os.fdopen(reading) as pipe:
        answers = dict(json.loads(line) for line in pipe)
    assert status == 0 and len(answers) == len(actions), (
        f"status {status} (None: it hung) in {list(actions)[len(answers) :][:1]}, after {answers}"
    )
    return answers
