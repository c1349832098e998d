"""A worker's whole part in a job: it joins, trains, joins again when left out, and leaves."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic, sleep
from types import FrameType
from typing import Literal, TypedDict, Unpack

import torch.distributed as dist

from torchft_ext import _C
from torchft_ext.elastic import _current
from torchft_ext.elastic._errors import (
    ElasticError,
    ElasticTimeoutError,
    JobOverError,
    LeftOutError,
)
from torchft_ext.elastic._exits import Exit
from torchft_ext.elastic._job import Job, current_job, join
from torchft_ext.elastic._supervise import Supervisor, is_supervised, start_pulse

__all__ = ["JoinOptions", "run"]

_logger = logging.getLogger("torchft_ext")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_TIMEOUT = timedelta(minutes=5)  # join()'s own
_LOOK_EVERY_S = 0.05
_STEADY_S = 60.0  # a member that was in the job for so long begins with the first pause again


class JoinOptions(TypedDict, total=False):
    """What run() passes on to join(), which says what each means."""

    size: int
    min_size: int | None
    max_size: int | None
    rule: str
    backend: str
    timeout: timedelta
    limit: timedelta
    interface: str | None
    port_range: str | None
    members: Sequence[str]
    listen: str | int | None
    key: str | None
    wait: bool
    on_no_quorum: Literal["raise", "wait"]


def run(
    train: Callable[[Job], object],
    address: str | None = None,
    *,
    leave_on: signal.Signals | None = signal.SIGTERM,
    supervise: bool = False,
    linger: timedelta | None = None,
    **options: Unpack[JoinOptions],
) -> Exit:
    """Join a job and train in it, as often as it takes, until the job is over.

    For example::

        def train(job):
            model = DDP(Net())
            ...
            for step in elastic.steps(state, total=1000):
                ...

        sys.exit(elastic.run(train, "host0:29500/job7", size=4, min_size=2))

    A process that was left out joins again, after 1 s at first and 30 s at most, and so does a
    spare whose wait for a place ran out of time. `train` is called anew each time: it makes model,
    optimizer and State itself. At the signal the process leaves after the step; a process that has
    no part in a view yet ends its wait at once. Blocks until then.

    Args:
        train: called with the job that was joined. It returns when steps() has ended. A loop of
            its own calls job.end().
        address: as that of join().
        leave_on: the signal at which this process leaves; None: it installs no handler, and
            leave() does the same. The handler of before is back when run() returns.
        supervise: True: this process starts the program's command line again, as its child, and
            only watches over it. A child that hangs while the others go on without it, or stands
            still, is ended; one that ends for a reason that may pass is started again. Call run()
            before anything that must not be done twice.
        linger: of a job with `members`: a listed process stays for so long after the end of the
            job, before it closes it, so that processes that come meanwhile are told that the job
            is over. Without a store nothing else tells them: they would wait for members, or found
            the job anew. The signal ends it. None: it does not stay.
        options: those of join().

    Returns:
        `Exit.OVER`, which is 0, where the job is over, also where this process came too late or was
        a spare that was not needed; `Exit.LEFT`, which is 75, where it was told to leave before.
        With `supervise` the parent does not return. It ends with the exit code of its last child.

    Raises:
        NoQuorumError, StateLostError, DivergenceError, NoProgressError, RepeatedError: the job
            cannot go on, or not with this process.
        ElasticError: the store does not answer, founders did not come in time; or `train` has
            returned before the job was over.
        ValueError, TypeError, RuntimeError: as join(). ValueError: `linger` is negative, or given
            without `members`.

    Whatever `train` raises passes through. In each of these cases the process has left the job.

    Threads: the main one.
    """
    if linger is not None and (linger < timedelta(0) or not options.get("members")):
        raise ValueError(
            "elastic.run: linger: expected none, or a time and a job with members=, found "
            f"{linger} and members={list(options.get('members', ()))}"
        )
    if supervise and not is_supervised():
        supervisor = Supervisor([sys.executable, *sys.orig_argv[1:]])
        with _told_by(leave_on, supervisor.tell):
            sys.exit(supervisor.until_end())
    start_pulse(_away_for, options.get("timeout", _TIMEOUT), _current.leave)
    with _current.leave_flag() as leaving, _told_by(leave_on, _current.leave):
        return _Runner(train, address, options, leaving, linger).until_end()


def _away_for() -> float:
    try:
        return current_job().away_for()
    except RuntimeError:  # it is joining, or pauses
        return 0.0


@contextmanager
def _told_by(signal_number: signal.Signals | None, leave: Callable[[], None]) -> Iterator[None]:
    if signal_number is None:
        yield
        return

    process = os.getpid()

    def handler(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == process:
            leave()
        else:  # a forked child, such as a worker of a DataLoader: it has no part in the job
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = signal.signal(signal_number, handler)
    try:
        yield
    finally:
        signal.signal(signal_number, before)


class _Runner:
    """The attempts of one run(), on whose thread it works."""

    def __init__(
        self,
        train: Callable[[Job], object],
        address: str | None,
        options: JoinOptions,
        leaving: _C._LeaveFlag,
        linger: timedelta | None,
    ) -> None:
        self._train = train
        self._address = address
        self._options = options
        self._leaving = leaving
        # A process that is not listed is not looked for.
        self._linger_s = linger.total_seconds() if linger and options.get("listen") else 0.0
        self._pause_s = _FIRST_PAUSE_S

    def until_end(self) -> Exit:
        while not self._leaving.is_set():
            began = monotonic()
            try:
                self._attempt()
                return Exit.OVER
            except JobOverError as error:
                _logger.warning("%s", error)
                return Exit.OVER
            except LeftOutError as error:
                if not self._leaving.is_set():
                    self._wait_to_join_again(error, monotonic() - began)
        return Exit.LEFT

    def _attempt(self) -> None:
        """Join, train, and close. Raises LeftOutError where it has to join again, or leaves."""
        job = join(self._address, **self._options)
        try:
            self._train(job)
            if not job.has_ended():
                self._refuse_early_end(job)
            self._wait(self._linger_s)  # others are told that it is over
        except ElasticTimeoutError as error:
            if job.view() is None and not isinstance(error, LeftOutError):  # of a spare
                raise LeftOutError(str(error)) from error
            raise
        finally:
            job.close()
            if dist.is_initialized():
                dist.destroy_process_group()

    def _refuse_early_end(self, job: Job) -> None:
        if self._leaving.is_set() or job.is_leaving():
            raise LeftOutError("this process has left the job")
        raise ElasticError(
            "elastic.run: train() returned, and the job is not known to be over: let the loop of "
            "steps() end by itself; a loop of your own calls job.end() once all have agreed"
        )

    def _wait_to_join_again(self, error: LeftOutError, lasted_s: float) -> None:
        if lasted_s >= _STEADY_S:
            self._pause_s = _FIRST_PAUSE_S
        _logger.warning("%s: joining again in %.0f s", error, self._pause_s)
        self._wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _wait(self, seconds: float) -> None:
        """Until then, or until this process is told to leave."""
        until = monotonic() + seconds
        while monotonic() < until and not self._leaving.is_set():
            sleep(_LOOK_EVERY_S)
