"""Forked children of a rank, each of which ends within a limit or is killed."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rankside import failure_of

CHILD_LIMIT = 20.0  # seconds; a child that takes longer hangs
TELLS_AFTER = 15.0  # seconds: where its threads of Python are


def threads_of(process: int) -> list[str]:
    """The name of each thread, its state, and the number of the system call that it is in."""
    tasks = Path(f"/proc/{process}/task")
    return [
        f"{(task / 'comm').read_text().strip()} {(task / 'stat').read_text().rsplit(')')[1][1]} "
        f"{(task / 'syscall').read_text().strip()}"
        for task in sorted(tasks.iterdir())
    ]


def wait_for(child: int) -> int | None:
    """Its exit status; None: it hung, and was killed."""
    limit = time.monotonic() + CHILD_LIMIT
    while time.monotonic() < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    print(f"child {child} hangs: {threads_of(child)}", file=sys.stderr, flush=True)
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
    places = tempfile.TemporaryFile("w+")
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(TELLS_AFTER, file=places)
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
    with places:
        places.seek(0)
        where = places.read()
    assert status == 0 and len(answers) == len(actions), (
        f"status {status} (None: it hung) in {list(actions)[len(answers) :][:1]}, after {answers}; "
        f"its threads of Python: {where}"
    )
    return answers
