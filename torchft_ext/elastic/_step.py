"""One try at one step of a training run, and what it asks of a job."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from traceback import clear_frames
from types import TracebackType
from typing import Protocol

import torch.distributed as dist

from torchft_ext.elastic._divergence import divergence
from torchft_ext.elastic._errors import (
    DivergenceError,
    ElasticError,
    ElasticTimeoutError,
    NoQuorumError,
)
from torchft_ext.elastic._evidence import Comparison, Evidence
from torchft_ext.elastic._goal import Goal
from torchft_ext.elastic._random import manual_seed
from torchft_ext.elastic._repeats import Raised
from torchft_ext.elastic._replicas import Place
from torchft_ext.elastic._state import State
from torchft_ext.elastic._view import Answer, Digest, View
from torchft_ext.errors import CommError, CommTimeoutError

__all__ = ["JobLike", "Step"]


class JobLike(Protocol):
    """What steps() asks of a job; Job is one. See there."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The managed default group."""

    @property
    def min_size(self) -> int:
        """The smallest world that trains."""

    @property
    def timeout(self) -> timedelta:
        """The limit of waits that have no other."""

    @property
    def limit(self) -> timedelta:
        """The silence after which a member counts as lost."""

    def waiting(self) -> list[str]:
        """Return who waits to be taken in, as far as this member knows."""

    def view(self) -> View | None:
        """Return the newest view that this process has formed; None before the first."""

    def is_over(self) -> bool:
        """Return whether the members have begun to decide on a view after view()."""

    def is_leaving(self) -> bool:
        """Return whether this member has said that it goes."""

    def leave(self) -> None:
        """Say that this member goes."""

    def end(self, *, agreed: bool = True) -> None:
        """Say that the job has ended well, and whether all members have agreed on that."""

    def recover(
        self, timeout: timedelta | None = None, *, patience: timedelta | None = None
    ) -> View:
        """Block until a newer view is formed; leave absent members out after `patience`."""

    def hold_shard(self, shard: int | None) -> None:
        """Say which part of the state this member has a whole copy of; None: of none."""

    def await_frozen(self, ranks: Sequence[int], patience: timedelta) -> None:
        """Say which ranks hold what nobody else has: one that freezes is waited for so long."""

    def wait_at_most(self, timeout: timedelta) -> AbstractContextManager[None]:
        """Let operations of managed groups wait no longer than this, within a block."""

    def agree(
        self,
        ok: bool,
        note: bytes = b"",
        timeout: timedelta | None = None,
        digest: Digest | None = None,
        *,
        last: bool = False,
    ) -> Answer:
        """Block until all members have voted."""

    def check(self) -> None:
        """Raise the CommError of a managed group that has failed."""

    def abort(self, reason: str) -> None:
        """End the generation on all members."""

    def make_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Make a group of these ranks of the view, which ends with the view."""

    def hold_groups(self) -> AbstractContextManager[Callable[[], None]]:
        """Let groups of make_group() that lose nobody outlive the view's end, within a block that
        calls what it is given once it has something to send.
        """

    def log(self, line: str) -> None:
        """Write a line to the log."""

    def count_steps(self, committed: int) -> None:
        """Say how many steps the run has committed by now."""


class Step:
    """One try at one step; a context manager that steps() yields.

    Its block swallows a CommError of a managed group: steps() then recovers. Any other exception
    ends the generation on all members, so that none waits for this one, and leaves the loop.
    Threads: one at a time. It is entered once.

    Attributes:
        number: how many steps were committed before it.
        view: the members that try it.
        rank: this member's among those that train, 0 to `size` - 1: the view's, but for replicas.
        size: how many train: the view's size, but for members that are parked.
        answer: what they agreed on; None before commit() and after a failure.
        failure: the CommError that ended the block; None where there was none.
        timed_out: a member that lives did not vote in time.
    """

    def __init__(
        self,
        state: State,
        job: JobLike,
        view: View,
        step_timeout: timedelta,
        place: Place | None,
        comparison: Comparison | None,
        goal: Goal,
    ) -> None:
        """steps() makes it."""
        self.number = state.step
        self.view = view
        self.rank = view.rank if place is None else place.rank
        self.size = view.size if place is None else place.size
        self.answer: Answer | None = None
        self.failure: CommError | None = None
        self.timed_out = False
        self.ended = False
        self._state = state
        self._job = job
        self._step_timeout = step_timeout
        self._comparison = comparison
        self._goal = goal
        self._entered = False
        self._stopped = False
        self._raised = False  # something that the block did not swallow
        self._view_over = False
        sampler = state.sampler
        self._epoch = None if sampler is None else sampler.epoch
        self._ends_epoch = sampler is not None and sampler.passes_after_step > sampler.epoch

    @property
    def committed(self) -> bool:
        """The members agreed that it counts."""
        return self.answer is not None and self.answer.ok

    @property
    def epoch(self) -> int:
        """The number of the pass over the data that it begins in, from 0 on.

        Raises:
            RuntimeError: the state has no BatchSampler, or more than one.
        """
        return self._of_sampler("epoch")

    @property
    def is_last_of_epoch(self) -> bool:
        """Its samples end the pass. That is so of this try: one of other members, which follows
        where this one fails, takes other samples. So what depends on it belongs into the functions
        that commit() runs.

        Raises:
            RuntimeError: the state has no BatchSampler, or more than one.
        """
        self._of_sampler("is_last_of_epoch")
        return self._ends_epoch

    def _of_sampler(self, name: str) -> int:
        if self._epoch is None:
            raise RuntimeError(f"step.{name}: expected one BatchSampler in the state")
        return self._epoch

    def stop(self) -> None:
        """Say that the run is over after this step. Once the step is committed, steps() ends on all
        members as after the last step. Any one member's word is enough. A step that is repeated
        has forgotten it.

        Raises:
            RuntimeError: commit() has been called.
        """
        if self.answer is not None:
            raise RuntimeError(f"step {self.number}: stop() belongs before commit()")
        self._stopped = True

    def say_left(self) -> None:
        """Warn that the loop was left while the run goes on; steps() calls it."""
        if self._raised or (self.answer is not None and self.answer.last):
            return
        warnings.warn(
            f"steps: the loop was left at step {self.number}, and the run goes on: the other "
            "members wait for this one until its process ends. Call step.stop() before commit() "
            "to end the run on all, or job.leave() before",
            stacklevel=3,
        )

    def manual_seed(self, seed: int) -> int:
        """Seed this process's random numbers for this step and rank; see elastic.manual_seed().

        At the begin of the block: a repeated step then draws the same, as far as the rank is the
        same.
        """
        return manual_seed(seed, self.number, self.rank)

    def __enter__(self) -> Step:
        """Clear the gradients, and keep what a failure must restore.

        Raises:
            RuntimeError: it was entered before.
        """
        if self._entered:
            raise RuntimeError(f"step {self.number}: a step is entered once; take the next one")
        self._entered = True
        self._state.clear_gradients()
        self._state.snapshot()
        return self

    def commit(self, *functions: Callable[[], object]) -> bool:
        """Agree with all members that the step counts; if so, run the update.

        Blocks until all have voted. Call it on all members, after the last collective of the step.

        Args:
            functions: what changes the state: unscaling, clipping, ``optimizer.step``,
                ``scheduler.step``, ``scaler.update``; they run in this order, on all members.

        Returns:
            Whether the step counts; the same on all members.

        Raises:
            CommError: a managed group failed, or the view is over: let it leave the block. Where
                it came out of one of the functions, the step counts, but not with this member's
                half-done update: this member's state is dirty, and taken from another one.
            DivergenceError: members do not hold the same; see `check` of steps(). On all members.
            RuntimeError: outside of the block, or the second time; or some of the step's
                micro-batches were taken, and others not.
            TypeError: what was given is no function; before anything is agreed on. Or the state has
                a value that no newcomer could be sent, such as a set; the step counts then.

        Whatever else a function raises passes through; the state is dirty then too.
        """
        if not self._entered or self.ended:
            raise RuntimeError(f"step {self.number}: commit() belongs into its `with` block")
        if self.answer is not None:
            raise RuntimeError(f"step {self.number}: commit() was called twice")
        self._check_functions(functions)
        self._state.check_batches()
        with self._job.hold_groups() as committed:
            self.answer = self._agree()
            if self.answer.ok:
                committed()
                self._update(functions)
        return self.answer.ok

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End the block: swallow what a recovery mends, tell the others of anything else."""
        self.ended = True
        self._raised = error is not None
        if isinstance(error, CommError) and self._is_managed():
            self.failure = error
            self._raised = False
            self._state.restore_modes()  # the failure may have cut a validation short
            clear_frames(traceback)  # they hold what the failed pass has made, and its model
            return True
        if error is not None and not isinstance(error, DivergenceError):  # which all raise
            self._job.abort(self._told_of(error))
        elif error is None and self.answer is None:
            self._refuse("the block ended without commit(); call it on every way through")
        return False

    def _told_of(self, error: BaseException) -> str:
        if not isinstance(error, Exception):  # Ctrl-C, sys.exit(): of this process alone
            return f"step {self.number}: it ended by {type(error).__name__}: {error}"
        return Raised(self.number, type(error).__name__, str(error)).reason()

    def require_ended(self) -> None:
        """Refuse to go on from a step that nobody entered.

        Raises:
            RuntimeError: its block has not ended.
        """
        if not self.ended:
            self._refuse("it was not entered; write `with step:` around its work")

    def _agree(self) -> Answer:
        """After a CommError of these two the view is over, whatever the groups' state."""
        evidence = Evidence()
        try:
            self._job.check()
            if self._comparison is not None:
                evidence = self._comparison.of_step()
            answer = self._vote(self._step_timeout, evidence)
        except CommError:
            self._view_over = True
            raise
        except (ElasticTimeoutError, NoQuorumError) as error:
            self._view_over = self.timed_out = True
            answer = self._answer_of_next_view(error)
        if answer.diverged:
            objects, timeout = self._state.objects, self._step_timeout
            raise divergence(self._job, self.view, evidence, objects, timeout)
        return answer

    def _vote(self, timeout: timedelta, evidence: Evidence) -> Answer:
        last = self._stopped or self._goal.is_reached_by_step(self._state)
        return self._job.agree(True, timeout=timeout, digest=evidence.digest(), last=last)

    def _answer_of_next_view(self, error: ElasticError) -> Answer:
        """End the wait on all members; the next view says whether the step counts all the same."""
        self._job.abort(f"step {self.number}: {error}")
        try:
            answer = self._vote(self._job.limit, Evidence())
        except ElasticError:  # recover() waits longer, or says that there is no quorum
            raise CommTimeoutError(str(error)) from error
        if not (answer.ok or answer.diverged):
            raise CommTimeoutError(str(error)) from error
        return answer

    def _check_functions(self, functions: tuple[object, ...]) -> None:
        """Refuse `commit(optimizer.step())`: that update was made before anybody agreed."""
        for function in functions:
            if not callable(function):
                raise TypeError(
                    f"step {self.number}: commit: expected functions, such as optimizer.step, "
                    f"found {type(function).__name__}; give the function itself, which commit() "
                    "calls once all have agreed"
                )

    def _update(self, functions: tuple[Callable[[], object], ...]) -> None:
        self._state.dirty = True
        for function in functions:
            function()
        self._state.commit()
        self._state.dirty = False
        self._state.check()

    def _is_managed(self) -> bool:
        """The error is one that recover() mends: else a group of the user's own has failed."""
        if self._view_over:
            return True
        try:
            self._job.check()
        except CommError:
            return True
        return False

    def _refuse(self, why: str) -> None:
        message = f"step {self.number}: {why}"
        self._job.abort(message)
        raise RuntimeError(message)
