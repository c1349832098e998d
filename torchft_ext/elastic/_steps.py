"""The training loop: steps that count on all members or on none."""

from __future__ import annotations

from collections.abc import Callable, Generator
from datetime import timedelta
from time import monotonic, sleep
from types import TracebackType
from typing import Protocol

import torch.distributed as dist

from torchft_ext.elastic._current import current
from torchft_ext.elastic._errors import ElasticError
from torchft_ext.elastic._state import Standing, State
from torchft_ext.elastic._sync import sync
from torchft_ext.elastic._view import Answer, View
from torchft_ext.errors import CommError, CommTimeoutError

__all__ = ["JobLike", "Step", "steps"]

_FAILURES = 3  # of one step, in views of the same members
_LOOK_EVERY_S = 0.05  # for newcomers


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

    def waiting(self) -> list[str]:
        """Return who waits to be taken in, as far as this member knows."""

    def view(self) -> View | None:
        """Return the newest view that this process has formed; None before the first."""

    def is_over(self) -> bool:
        """Return whether the members have begun to decide on a view after view()."""

    def recover(self, timeout: timedelta | None = None) -> View:
        """Block until a newer view is formed."""

    def agree(self, ok: bool, note: bytes = b"", timeout: timedelta | None = None) -> Answer:
        """Block until all members have voted."""

    def check(self) -> None:
        """Raise the CommError of a managed group that has failed."""

    def abort(self, reason: str) -> None:
        """End the generation on all members."""


def steps(
    state: State,
    total: int,
    *,
    job: JobLike | None = None,
    build: Callable[[View], object] | None = None,
    agree_timeout: timedelta | None = None,
) -> Generator[Step, None, None]:
    """Yield the steps of a training run, each until it is committed.

        for step in elastic.steps(state, total=1000):
            with step:
                loss(model(batch)).backward()
                step.commit(optimizer.step, scheduler.step)

    Blocks before the first step and after a change of members: until a view is formed, has
    `min_size` members, and the state is the same on all. A step whose generation failed is yielded
    again, with gradients cleared, and buffers and the loss scaler as they were when it began.
    Members are taken in and leave at one boundary between steps. It ends when `total` steps are
    committed, or when this member's leaving has been agreed on.

    Args:
        state: what all members hold alike; `state.step` says where to begin.
        total: how many steps the run has.
        job: None: this process's.
        build: called with each new view before the state is synced, for what must be wrapped anew
            (FSDP2 after a failed backward); it puts it into the state by State.replace().
        agree_timeout: of the agreement on one step; None: the job's.

    Raises:
        CommError: one step failed three times without a change of members; the last failure.
        NoQuorumError, LeftOutError, StateLostError, DivergenceError: the job cannot go on here.
        ElasticError: one step was voted down three times without a change of members.
        RuntimeError: a step was left without commit(), or was not entered.

    Threads: the caller's only. Source: state.commit() of Horovod Elastic; here the
    members agree before the update, so that no state needs to be rolled back.
    """
    loop = _Loop(state, job if job is not None else current(), build)
    view: View | None = loop.first_view()
    while view is not None and state.step < total:
        step = Step(state, loop.job, view, agree_timeout)
        yield step
        if loop.was_last(step, total):
            return  # the others go too: there may be no other view
        view = loop.view_after(step)


class Step:
    """One try at one step; a context manager that steps() yields.

    Its block swallows a CommError of a managed group: steps() then recovers. Any other exception
    ends the generation on all members, so that none waits for this one, and leaves the loop.
    Threads: one at a time. It is entered once.

    Attributes:
        number: how many steps were committed before it.
        view: the members that try it.
        answer: what they agreed on; None before commit() and after a failure.
        failure: the CommError that ended the block; None where there was none.
    """

    def __init__(
        self, state: State, job: JobLike, view: View, agree_timeout: timedelta | None
    ) -> None:
        """steps() makes it."""
        self.number = state.step
        self.view = view
        self.answer: Answer | None = None
        self.failure: CommError | None = None
        self.ended = False
        self._state = state
        self._job = job
        self._agree_timeout = agree_timeout
        self._entered = False
        self._view_over = False

    @property
    def committed(self) -> bool:
        """The members agreed that it counts."""
        return self.answer is not None and self.answer.ok

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
            RuntimeError: outside of the block, or the second time.

        Whatever else a function raises passes through; the state is dirty then too.
        """
        if not self._entered or self.ended:
            raise RuntimeError(f"step {self.number}: commit() belongs into its `with` block")
        if self.answer is not None:
            raise RuntimeError(f"step {self.number}: commit() was called twice")
        self.answer = self._agree()
        if self.answer.ok:
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
        if isinstance(error, CommError) and self._is_managed():
            self.failure = error
            return True
        if error is not None:
            self._job.abort(f"step {self.number}: {type(error).__name__}: {error}")
        elif self.answer is None:
            self._refuse("the block ended without commit(); call it on every way through")
        return False

    def require_ended(self) -> None:
        """Refuse to go on from a step that nobody entered.

        Raises:
            RuntimeError: its block has not ended.
        """
        if not self.ended:
            self._refuse("it was not entered; write `with step:` around its work")

    def _agree(self) -> Answer:
        """After a CommError of these two the view is over, whatever the groups' state."""
        try:
            self._job.check()
            return self._job.agree(True, timeout=self._agree_timeout)
        except CommError:
            self._view_over = True
            raise

    def _update(self, functions: tuple[Callable[[], object], ...]) -> None:
        self._state.dirty = True
        for function in functions:
            function()
        self._state.commit()
        self._state.dirty = False

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


class _Failures:
    """Counts failures while the members stay the same, and gives up at the third."""

    def __init__(self) -> None:
        self._members: tuple[str, ...] = ()
        self._count = 0

    def clear(self) -> None:
        self._count = 0

    def add(self, error: Exception, members: tuple[str, ...]) -> None:
        if members != self._members:
            self._members, self._count = members, 0
        self._count += 1
        if self._count >= _FAILURES:
            raise error


class _Loop:
    """What happens between steps: which view comes next, and that all have one state in it."""

    def __init__(self, state: State, job: JobLike, build: Callable[[View], object] | None) -> None:
        self.job = job
        self._state = state
        self._build = build
        self._failures = _Failures()

    def first_view(self) -> View:
        view = self.job.view()
        if view is None:
            return self._next_view(None)
        return view if self._take_in(view) else self._next_view(view)

    def was_last(self, step: Step, total: int) -> bool:
        """Whether the run is over with this step, and this member holds its result."""
        step.require_ended()
        return step.committed and self._state.step >= total and not self._state.dirty

    def view_after(self, step: Step) -> View | None:
        """The view of the next step; None where this member leaves."""
        step.require_ended()
        if not step.committed:
            self._undo(step)
        elif not self._state.dirty:
            self._failures.clear()
        answer = step.answer
        if answer is not None and step.view.member in answer.leaving:
            return None
        if answer is not None and (answer.waiting or answer.leaving):
            return self._next_view(step.view)
        if step.failure is not None or self._state.dirty or self.job.is_over():
            return self._next_view(step.view)
        return step.view

    def _undo(self, step: Step) -> None:
        """Make the state that of the step's begin."""
        self._state.restore()
        self._state.rewind()
        error = step.failure or ElasticError(f"step {step.number} was voted down; it is repeated")
        self._failures.add(error, step.view.members)

    def _next_view(self, last: View | None) -> View:
        """The next one that can train."""
        while True:
            try:
                view = self.job.recover()
            except CommTimeoutError:
                raise
            except CommError as error:  # a member was lost just when the view had formed
                self._failures.add(error, () if last is None else last.members)
                continue
            if self._take_in(view):
                return view
            last = view

    def _take_in(self, view: View) -> bool:
        """Bring all members to one state; False where that takes another view."""
        self._note(view)
        if view.size < self.job.min_size:
            self._await_newcomers(view)
            return False
        try:
            self._share(view)
        except CommError as error:
            self._failures.add(error, view.members)
            return False
        except BaseException as error:
            self.job.abort(f"view {view.number}: {type(error).__name__}: {error}")
            raise
        return True

    def _await_newcomers(self, view: View) -> None:
        """Wait until somebody asks for a place, here or at another member."""
        until = monotonic() + self.job.timeout.total_seconds()
        while not self.job.waiting() and not self.job.is_over():
            if monotonic() >= until:
                raise ElasticError(
                    f"view {view.number} has {view.size} members, fewer than min_size="
                    f"{self.job.min_size}, and no process joined within {self.job.timeout}: "
                    "start more, or found the job with a smaller min_size"
                )
            sleep(_LOOK_EVERY_S)

    def _note(self, view: View) -> None:
        """A process that joined again has a new id, and with it no standing."""
        if self._state.standing.member != view.member:
            founder = view.founder or not any(view.members_continuing)
            self._state.standing = Standing(view.member, founder=founder)

    def _share(self, view: View) -> None:
        state, standing = self._state, self._state.standing
        if self._build is not None:
            self._build(view)
        state.follow(view.rank, view.size)
        report = sync(
            state,
            self.job.group,
            continuing=standing.synced,
            lineage=state.lineage,
            step=state.step,
            # A newcomer that has not got the job's state must never pass its own on as that.
            dirty=state.dirty or not (standing.synced or standing.founder),
            allow_pickle=state.allow_pickle,
        )
        self.job.check()
        standing.synced = True
        state.lineage = view.lineage
        view.phases["sync"] = report.elapsed
