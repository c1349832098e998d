"""The training loop: steps that count on all members or on none."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from time import monotonic, sleep
from traceback import clear_frames
from types import TracebackType
from typing import Protocol

import torch.distributed as dist

from torchft_ext.elastic._current import current
from torchft_ext.elastic._errors import (
    DivergenceError,
    ElasticError,
    LeftOutError,
    NoQuorumError,
    StateLostError,
)
from torchft_ext.elastic._random import manual_seed
from torchft_ext.elastic._rebuild import rebuild
from torchft_ext.elastic._replicas import Held, Place, Replicas
from torchft_ext.elastic._state import NO_LINEAGE, Standing, State
from torchft_ext.elastic._sync import sync
from torchft_ext.elastic._versions import WHOLE
from torchft_ext.elastic._view import Answer, View
from torchft_ext.elastic._wire import Wire
from torchft_ext.errors import CommError, CommTimeoutError

__all__ = ["JobLike", "Step", "steps"]

_FAILURES = 3  # of one step, in views of the same members
_LOOK_EVERY_S = 0.05  # for newcomers
_NO_VIEW = (CommError, NoQuorumError, LeftOutError, StateLostError)


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

    def make_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Make a group of these ranks of the view, which ends with the view."""

    def hold_groups(self) -> AbstractContextManager[Callable[[], None]]:
        """Let groups of make_group() that lose nobody outlive the view's end, within a block that
        calls what it is given once it has something to send.
        """

    def log(self, line: str) -> None:
        """Write a line to the log."""


def steps(
    state: State,
    total: int,
    *,
    job: JobLike | None = None,
    build: Callable[[View], object] | None = None,
    replicas: Replicas | None = None,
    agree_timeout: timedelta | None = None,
) -> Generator[Step, None, None]:
    """Yield the steps of a training run, each until it is committed.

        for step in elastic.steps(state, total=1000):
            with step:
                loss(model(batch)).backward()
                step.commit(optimizer.step, scheduler.step)

    Blocks before the first step and after a change of members: until a view is formed, has
    `min_size` members, and the state is the same on all. A step whose generation failed is yielded
    again, with gradients cleared, and buffers, the loss scaler and the modules' train() or eval()
    as they were when it began. Members are taken in and leave at one boundary between steps. It
    ends when `total` steps are committed and all that train hold the result, or when this member's
    leaving has been agreed on. A member that holds the result raises nothing where others are lost
    after the last step.

    Args:
        state: what all members hold alike; `state.step` says where to begin.
        total: how many steps the run has.
        job: None: this process's.
        build: called with each new view before the state is synced, for what must be wrapped anew
            (FSDP2); it returns objects by name, which go into the state (State.put()). What was
            there under these names is copied into them.
        replicas: of sharded models. A parked member gets no steps, but votes, until it is needed;
            `build` is not called for it. It returns when the run is over, with a state that is
            dirty.
        agree_timeout: of the agreement on one step, and of what a member that holds the result
            waits for after the last one; None: the job's.

    Raises:
        CommError: one step failed three times without a change of members; the last failure.
        NoQuorumError, LeftOutError, StateLostError, DivergenceError: the job cannot go on here.
        ElasticError: one step was voted down three times without a change of members.
        RuntimeError: a step was left without commit(), or was not entered.

    Threads: the caller's only. Source: state.commit() of Horovod Elastic; here the
    members agree before the update, so that no state needs to be rolled back.
    """
    loop = _Loop(state, total, job if job is not None else current(), build, replicas)
    view: View | None = loop.first_view()
    while view is not None:
        if loop.over:
            view = loop.leave_together(view, agree_timeout)
        elif loop.parked:
            view = loop.sit_out(view, agree_timeout)
        else:
            step = Step(state, loop.job, view, agree_timeout, loop.place)
            yield step
            view = loop.view_after(step)


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
    """

    def __init__(
        self,
        state: State,
        job: JobLike,
        view: View,
        agree_timeout: timedelta | None,
        place: Place | None,
    ) -> None:
        """steps() makes it."""
        self.number = state.step
        self.view = view
        self.rank = view.rank if place is None else place.rank
        self.size = view.size if place is None else place.size
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
            RuntimeError: outside of the block, or the second time.
            TypeError: what was given is no function; before anything is agreed on.

        Whatever else a function raises passes through; the state is dirty then too.
        """
        if not self._entered or self.ended:
            raise RuntimeError(f"step {self.number}: commit() belongs into its `with` block")
        if self.answer is not None:
            raise RuntimeError(f"step {self.number}: commit() was called twice")
        self._check_functions(functions)
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
        if isinstance(error, CommError) and self._is_managed():
            self.failure = error
            self._state.restore_modes()  # the failure may have cut a validation short
            clear_frames(traceback)  # they hold what the failed pass has made, and its model
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

    def __init__(
        self,
        state: State,
        total: int,
        job: JobLike,
        build: Callable[[View], object] | None,
        replicas: Replicas | None,
    ) -> None:
        self.job = job
        self._state = state
        self._total = total
        self._reached = 0  # steps that the members have committed; the state may lack the last
        self._build = build
        self._replicas = replicas
        self._failures = _Failures()

    @property
    def over(self) -> bool:
        """The members have committed the last step, as far as is known here."""
        return self._reached >= self._total

    @property
    def place(self) -> Place | None:
        """Where this member trains; None: there are no replicas, or it is in none."""
        return None if self._replicas is None else self._replicas.place

    @property
    def parked(self) -> bool:
        """This member is in no replica of the view."""
        return self._replicas is not None and self.place is None

    def first_view(self) -> View:
        view = self.job.view()
        if view is None:
            return self._next_view(None)
        return view if self._take_in(view) else self._next_view(view)

    def view_after(self, step: Step) -> View | None:
        """The view of the next step; None where this member leaves."""
        step.require_ended()
        if step.committed:
            self._reached = step.number + 1
        else:
            self._undo(step)
        if step.committed and not self._state.dirty:
            self._failures.clear()
        if self.over:
            return step.view  # nobody is taken in, or leaves alone
        return self._after(step.view, step.answer, failed=step.failure is not None)

    def sit_out(self, view: View, timeout: timedelta | None) -> View | None:
        """Vote on one step of the others; the view of the next, None where this member leaves."""
        answer: Answer | None = None
        with suppress(CommError):
            answer = self.job.agree(True, timeout=timeout)
        if answer is not None and answer.ok:
            self._state.step += 1
            self._state.dirty = True  # it has not taken part in it
            self._reached = self._state.step
        if self.over:
            return view
        return self._after(view, answer, failed=answer is None)

    def leave_together(self, view: View, timeout: timedelta | None) -> View | None:
        """None once all that train hold the result; else a view in which who lacks it got it.

        Who has it stays until then: the update of another one may have failed in the last step. But
        where no such view comes it goes, and it waits for one no longer than for an agreement.
        """
        parked = self.parked  # nobody counts on its state, even if the next view gives it a place
        holds = parked or not self._state.dirty
        answer: Answer | None = None
        try:
            answer = self.job.agree(holds, timeout=timeout)
        except CommError:
            pass  # of the view: the next one says more
        except ElasticError as error:
            self._go_alone(error, holds=holds)
            return None
        if answer is not None and (answer.ok or view.member in answer.leaving):
            return None
        try:
            return self._next_view(view, timeout if holds else None)
        except _NO_VIEW as error:
            self._go_alone(error, holds=parked or not self._state.dirty)
            return None

    def _go_alone(self, error: Exception, *, holds: bool) -> None:
        """An error of the others' is none of a member that holds the result."""
        if not holds:
            raise error
        self.job.log(f"elastic job: the run is over, and this member did not wait: {error}")

    def _after(self, view: View, answer: Answer | None, *, failed: bool) -> View | None:
        if answer is not None and answer.changes_view:
            self._await_updates()
            return None if view.member in answer.leaving else self._next_view(view)
        if failed or (self._state.dirty and not self.parked) or self.job.is_over():
            return self._next_view(view)
        return view

    def _await_updates(self) -> None:
        """Whoever asks for the next view ends this one: not while others' updates communicate."""
        if self.parked or not self._state.dirty:
            with suppress(CommError):
                dist.barrier(group=self.job.group)

    @property
    def _group(self) -> dist.ProcessGroup:
        """Of all that train."""
        if self._replicas is not None and self._replicas.group is not None:
            return self._replicas.group
        return self.job.group

    def _undo(self, step: Step) -> None:
        """Make the state that of the step's begin."""
        self._state.restore()
        self._state.rewind()
        error = step.failure or ElasticError(f"step {step.number} was voted down; it is repeated")
        self._failures.add(error, step.view.members)

    def _next_view(self, last: View | None, timeout: timedelta | None = None) -> View:
        """The next one that can train, or hand on the result; None: by the job's timeout."""
        while True:
            try:
                view = self.job.recover(timeout)
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
        try:
            if self._replicas is not None:
                self._catch_up(self._replicas.follow(self.job, view, self._held()))
            if view.size < self._least_size() and not self._hands_on(view):
                self._await_newcomers(view)
                return False
            if not self.parked:
                self._share(view)
            self._reached = self._state.step
        except CommError as error:
            self._failures.add(error, view.members)
            return False
        except (StateLostError, DivergenceError):
            raise  # all find it in the same words of all: nobody waits, and an abort cut them short
        except BaseException as error:
            self.job.abort(f"view {view.number}: {type(error).__name__}: {error}")
            raise
        return True

    def _catch_up(self, step: int) -> None:
        """A newcomer that is parked counts on from the others' steps, without their state."""
        if self.parked and self._state.step < step:
            self._state.step, self._state.dirty = step, True

    @property
    def _shards(self) -> int:
        return 1 if self._replicas is None else self._replicas.shards

    def _least_size(self) -> int:
        """Of a view that trains."""
        return max(self.job.min_size, self._shards)

    def _hands_on(self, view: View) -> bool:
        """Whether a view too small to train has the run's result to hand on: the same on all.

        They ask each other, since a newcomer does not know.

        Raises:
            StateLostError: the run is over, and they are too few to hold the result. On all.
        """
        said = Wire(self.job.group).all_gather_bytes(bytes([self.over]))
        if bytes([True]) not in said:
            return False
        if view.size < self._shards:
            raise StateLostError(
                f"the run is over, and view {view.number} has {view.size} members, fewer than the "
                f"{self._shards} shards of its result; found a new job from a checkpoint"
            )
        return True

    def _held(self) -> Held:
        """What this member brings into a view of replicas."""
        state, standing = self._state, self._state.standing
        clean = not state.dirty and standing.shard >= 0
        return Held(standing.replica, standing.shard, clean, state.step, standing.synced)

    def _await_newcomers(self, view: View) -> None:
        """Wait until somebody asks for a place, here or at another member."""
        until = monotonic() + self.job.timeout.total_seconds()
        while not self.job.waiting() and not self.job.is_over():
            if monotonic() >= until:
                raise ElasticError(
                    f"view {view.number} has {view.size} members, fewer than min_size="
                    f"{self._least_size()}, and no process joined within {self.job.timeout}: "
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
        place = self.place
        moved = place is not None and standing.shard not in (-1, place.shard)
        # A newcomer that has not got the job's state must never pass its own on as that.
        new = moved or not (standing.synced or standing.founder)
        if self._build is not None:
            state.dirty = state.dirty or moved  # until the sync: of its old shard nothing stays
            rebuild(state, self._build, view, keep=not (new or state.dirty))
        state.follow(*((view.rank, view.size) if place is None else (place.rank, place.size)))
        report = sync(
            state,
            self._group,
            continuing=standing.synced and not moved,
            lineage=NO_LINEAGE if moved else state.lineage,
            step=state.step,
            dirty=state.dirty or new,
            allow_pickle=state.allow_pickle,
            shard=WHOLE if place is None else place.shard,
        )
        self.job.check()
        standing.synced = True
        if place is not None:
            standing.replica, standing.shard = place.replica, place.shard
        state.lineage = view.lineage
        view.phases["sync"] = report.elapsed
        self.job.log(
            f"elastic job: view {view.number}: step {report.step}, the state of rank "
            f"{report.source}; sync {report.elapsed.total_seconds():.3f} s: {report.tensors} "
            f"tensors, {report.nbytes} bytes, to ranks {list(report.took)}"
        )
