"""run(supervise=True): a parent that ends a worker which hangs, and starts it again.

The parent runs the program's own command line as its child, and takes no part in the job. A pipe
goes from the child to the parent: a thread of the child writes to it, unless the whole process
stands still or holds Python's lock. The same thread ends a process whose program does not come back
though its view is over: the others have gone on without it, and nothing of this package keeps it.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, sleep

from torchft_ext.elastic._exits import Exit

__all__ = ["Pulse", "Supervisor", "is_supervised", "start_pulse"]

_logger = logging.getLogger("torchft_ext")
_PIPE = "TORCHFT_EXT_SUPERVISED"  # the descriptor of its end, in the child's environment
_BEAT_EVERY_S = 1.0
_LOOK_EVERY_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_STEADY_S = 60.0  # a child that lived for so long is started again after the first pause
# 2: wrong arguments. LEFT: it was told to leave; others than the parent may have told it.
_FINAL = (Exit.OVER, 2, Exit.LEFT, *(code for code in Exit if 80 <= code <= 89))


_pulses: list[Pulse] = []  # this process's; one at most


def is_supervised() -> bool:
    """Return whether this process is the child of a Supervisor."""
    return bool(_pulses) or _PIPE in os.environ


def start_pulse(
    hangs_for: Callable[[], float], limit: timedelta, on_orphaned: Callable[[], None]
) -> None:
    """Of a supervised process, the first time that it is called: see Pulse."""
    if _PIPE in os.environ:
        pipe = int(os.environ.pop(_PIPE))  # children of this one are not supervised
        _pulses.append(Pulse(pipe, hangs_for, limit, on_orphaned))
        _pulses[0].start()


class Supervisor:
    """Runs a command until it ends for good. Owner: run(), in the parent. Threads: the main one."""

    def __init__(self, command: Sequence[str], silence: timedelta = timedelta(minutes=1)) -> None:
        """silence: after a child's first beat it is killed when none comes for so long."""
        self._command = list(command)
        self._silence_s = silence.total_seconds()
        self._told = False
        self._child: subprocess.Popen[bytes] | None = None

    def tell(self) -> None:
        """Pass the word to leave on to the child. From a handler too."""
        self._told = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def until_end(self) -> int:
        """Start it, and again after each end that is not final; return the last exit code."""
        pause_s = _FIRST_PAUSE_S
        while True:
            began = monotonic()
            code = self._run_once()
            if self._told or code in _FINAL:
                return code if code >= 0 else 128 - code
            if monotonic() - began >= _STEADY_S:
                pause_s = _FIRST_PAUSE_S
            _logger.warning("the worker ended with %d: starting it again in %.0f s", code, pause_s)
            self._pause(pause_s)
            if self._was_told():
                return Exit.LEFT
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _was_told(self) -> bool:
        return self._told

    def _pause(self, pause_s: float) -> None:
        until = monotonic() + pause_s
        while monotonic() < until and not self._told:
            sleep(_LOOK_EVERY_S)

    def _run_once(self) -> int:
        reading, writing = os.pipe()
        try:
            env = {**os.environ, _PIPE: str(writing)}
            self._child = subprocess.Popen(self._command, env=env, pass_fds=[writing])
            os.close(writing)
            if self._told:  # while it was started
                self._child.send_signal(signal.SIGTERM)
            return self._watch(self._child, reading)
        finally:
            os.close(reading)

    def _watch(self, child: subprocess.Popen[bytes], reading: int) -> int:
        heard: float | None = None
        open_ = True
        while child.poll() is None:
            ready = select.select([reading] if open_ else [], [], [], _LOOK_EVERY_S)[0]
            if ready:
                open_ = bool(os.read(reading, 4096))
                heard = monotonic()
            if heard is not None and monotonic() - heard > self._silence_s:
                _logger.warning("the worker, pid %d, stands still: it is killed", child.pid)
                child.kill()
                child.wait()
        return child.wait()


class Pulse:
    """Tells the parent that this process lives, and ends it where its program hangs.

    Owner: start_pulse(); it lasts as long as the process. Threads: one of its own.
    """

    def __init__(
        self,
        pipe: int,
        hangs_for: Callable[[], float],
        limit: timedelta,
        on_orphaned: Callable[[], None],
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """hangs_for: for how many seconds the program has not come back. on_orphaned: once, where
        there is no parent any more.
        """
        self._pipe = pipe
        os.set_inheritable(self._pipe, False)
        self._hangs_for = hangs_for
        self._limit_s = limit.total_seconds()
        self._on_orphaned = on_orphaned
        self._end = end

    def start(self) -> None:
        """Begin, on a thread of its own."""
        threading.Thread(target=self._beat, name="ft-pulse", daemon=True).start()

    def _beat(self) -> None:
        while self._write() and not self._end_if_hung():
            sleep(_BEAT_EVERY_S)

    def _write(self) -> bool:
        try:
            os.write(self._pipe, b".")
        except OSError:
            self._on_orphaned()
            return False
        return True

    def _end_if_hung(self) -> bool:
        if self._hangs_for() <= self._limit_s:
            return False
        _logger.error(
            "this member was left out, and its program has not come back for %.0f s: it hangs, and "
            "the process ends",
            self._limit_s,
        )
        faulthandler.dump_traceback(sys.stderr.fileno())
        self._end(Exit.HUNG)
        return True
