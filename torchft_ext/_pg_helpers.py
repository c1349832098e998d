"""Threads that wait or work in the place of others.

Owner: the process, which has one `helpers`; none of it is the same in a fork. Threads: any thread
gives tasks, a handler of a signal among them; `ft-helper` threads run them.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable


class Helpers:
    """Threads for tasks: as many as there are at the same time, kept."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Have none, as in a forked process."""
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a signal's handler may need a helper, too
        self._idle = 0

    def run(self, task: Callable[[], None]) -> None:
        """Run it on a helper. Does not block.

        Raises:
            RuntimeError: no thread is left.
        """
        with self._lock:
            if self._idle > 0:
                self._idle -= 1  # nothing can come between the two lines
                self._tasks.put(task)
                return
        threading.Thread(target=self._work, args=([task],), name="ft-helper", daemon=True).start()

    def _work(self, first: list[Callable[[], None]]) -> None:
        """Take the first task out of the list: the thread's object keeps its arguments."""
        task = first.pop()
        while True:
            task()
            del task  # not held while this one waits
            with self._lock:
                self._idle += 1
            task = self._tasks.get()


helpers = Helpers()
os.register_at_fork(after_in_child=helpers.forget)


def uninterrupted(task: Callable[[], None]) -> None:
    """Run it to its end, whatever handlers of signals raise meanwhile: these run on the main
    thread, where the task is given to a helper. Blocks until the end, or raises what they raise."""
    if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
        return task()
    over, errors = threading.Event(), []

    def run() -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    try:
        helpers.run(run)
    except RuntimeError:  # no thread is left
        return task()
    over.wait()
    if errors:
        raise errors[0]
