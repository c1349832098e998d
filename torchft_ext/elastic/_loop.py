"""What happens between the steps of a training run, from one view to the next."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep

import torch.distributed as dist

from torchft_ext import _events
from torchft_ext._tally import tally
from torchft_ext.elastic._divergence import divergence
from torchft_ext.elastic._errors import (
    DivergenceError,
    ElasticError,
    LeftOutError,
    NoProgressError,
    NoQuorumError,
    RepeatedError,
    StateLostError,
)
from torchft_ext.elastic._evidence import Check, Comparison, Evidence
from torchft_ext.elastic._goal import Goal
from torchft_ext.elastic._rebuild import rebuild
from torchft_ext.elastic._repeats import Repeats
from torchft_ext.elastic._replicas import Held, Place, Replicas
from torchft_ext.elastic._state import NO_LINEAGE, Standing, State
from torchft_ext.elastic._step import JobLike, Step
from torchft_ext.elastic._sync import sync
from torchft_ext.elastic._versions import WHOLE
from torchft_ext.elastic._view import Answer, View
from torchft_ext.elastic._wire import Wire
from torchft_ext.errors import CommError, CommTimeoutError

__all__ = ["Loop"]

_FAILURES = 3  # of one step, in views of the same members
_LOOK_EVERY_S = 0.05  # for newcomers
_NO_VIEW = (CommError, NoQuorumError, NoProgressError, LeftOutError, StateLostError)


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


class Loop:
    """What happens between steps: which view comes next, and that all have one state in it."""

    def __init__(
        self,
        state: State,
        goal: Goal,
        job: JobLike,
        build: Callable[[View], object] | None,
        replicas: Replicas | None,
        check: Check,
        step_timeout: timedelta,
    ) -> None:
        self.job = job
        self.comparison: Comparison | None = None  # of what trains in this view
        self._state = state
        self._goal = goal
        self._over = False  # a step was the last one; the state may lack it
        self._build = build
        self._replicas = replicas
        self._check = check
        self._step_timeout = step_timeout
        self._evened = 0  # the view in which results were made one
        self._timed_out = False  # in this view somebody was waited for in vain
        self._failures = _Failures()
        self._repeats = Repeats()

    @property
    def over(self) -> bool:
        """The members have committed the last step, as far as is known here."""
        return self._over or self._goal.is_reached(self._state)

    @property
    def place(self) -> Place | None:
        """Where this member trains; None: there are no replicas, or it is in none."""
        return None if self._replicas is None else self._replicas.place

    @property
    def parked(self) -> bool:
        """This member is in no replica of the view."""
        return self._replicas is not None and self.place is None

    def first_view(self) -> View | None:
        """The first that this member trains in; None: it leaves before."""
        if self._replicas is not None:
            self.job.await_frozen((), self._frozen_timeout)
        view = self.job.view()
        if view is not None and self._take_in(view):
            return view
        return self._next_view_or_none(view)

    def view_after(self, step: Step) -> View | None:
        """The view of the next step; None where this member leaves."""
        step.require_ended()
        self._note_holders(step.answer)
        if not step.committed:
            self._note_failure(step.failure, step.view)
        if step.answer is not None and step.committed:
            self._over = self._over or step.answer.last
        else:
            self._undo(step)
        self._count(step.view, step.number, committed=step.committed)
        if step.committed and not self._state.dirty:
            self._failures.clear()
        self._timed_out = step.timed_out or isinstance(step.failure, CommTimeoutError)
        if self.over:
            return step.view  # nobody is taken in, or leaves alone
        return self._after(step.view, step.answer, failed=step.failure is not None)

    def _count(self, view: View, number: int, *, committed: bool) -> None:
        """Say how a try at that step ended, to those who watch."""
        if committed:
            self.job.count_steps(self._state.step)
        tally.note_try(committed, self._state.step)
        _events.commit(view.member, view.rank, view.number, number, committed)

    def sit_out(self, view: View) -> View | None:
        """Vote on one step of the others; the view of the next, None where this member leaves.

        How long they compute is not known here: those that train notice who hangs.
        """
        answer: Answer | None = None
        timeout = max(self.job.timeout, self._step_timeout) + self._frozen_timeout
        try:
            answer = self.job.agree(True, timeout=timeout)
        except CommError as error:
            self._note_failure(error, view)
        self._note_holders(answer)
        if answer is not None and answer.diverged:
            raise divergence(self.job, view, Evidence(), {}, self._step_timeout)
        if answer is not None and answer.ok:
            self._state.step += 1
            self._state.dirty = True  # it has not taken part in it
            self._over = self._over or answer.last
            self.job.count_steps(self._state.step)
        if self.over:
            return view
        return self._after(view, answer, failed=answer is None)

    def leave_together(self, view: View) -> View | None:
        """None once all that train hold the result; else a view in which who lacks it got it.

        Who has it stays until then: the update of another one may have failed in the last step. But
        where no such view comes it goes, and it waits for one no longer than for an agreement.
        """
        parked = self.parked  # nobody counts on its state, even if the next view gives it a place
        holds = parked or not self._state.dirty
        answer: Answer | None = None
        try:
            answer = self._agree_on_result(view, holds)
        except CommError:
            pass  # of the view: the next one says more
        except DivergenceError:
            raise
        except ElasticError as error:
            self._go_alone(error, holds=holds)
            return None
        if answer is not None and (answer.ok or view.member in answer.leaving):
            self.job.end(agreed=answer.ok)
            return None
        if answer is not None and answer.diverged:
            return view
        try:
            return self._next_view(view, self._step_timeout if holds else None)
        except _NO_VIEW as error:
            self._go_alone(error, holds=parked or not self._state.dirty)
            return None

    def _agree_on_result(self, view: View, holds: bool) -> Answer:
        """Whether all that train hold it, and the same one."""
        timeout = self._step_timeout
        evidence = self._evidence_of_result() if holds else Evidence()
        answer = self.job.agree(holds, timeout=timeout, digest=evidence.digest())
        if answer.diverged and not self._evens_out(view):
            raise divergence(self.job, view, evidence, self._state.objects, timeout)
        return answer

    def _evidence_of_result(self) -> Evidence:
        try:
            return Evidence() if self.comparison is None else self.comparison.of_result()
        except BaseException as error:
            self.job.abort(f"the result: {type(error).__name__}: {error}")
            raise

    def _evens_out(self, view: View) -> bool:
        """Make one result of those of members that drifted apart: once in a view. Blocks."""
        if not self._drift or self._evened == view.number:
            return False
        self._evened = view.number
        if not self.parked:
            self._sync(view, new=False, moved=False)
        return True

    def _go_alone(self, error: Exception, *, holds: bool) -> None:
        """An error of the others' is none of a member that holds the result, or leaves."""
        if not holds and not (isinstance(error, LeftOutError) and self.job.is_leaving()):
            raise error
        self.job.end(agreed=False)
        self.job.log(f"the run is over, and this member did not wait: {error}")

    def _after(self, view: View, answer: Answer | None, *, failed: bool) -> View | None:
        if answer is not None and answer.changes_view:
            self._await_updates()
            return None if view.member in answer.leaving else self._next_view_or_none(view)
        if failed or (self._state.dirty and not self.parked) or self.job.is_over():
            return self._next_view_or_none(view)
        return view

    def _next_view_or_none(self, last: View | None) -> View | None:
        """None where this member leaves, which others may hear of before they agree on it."""
        try:
            return self._next_view(last)
        except LeftOutError:
            if self.job.is_leaving():
                return None
            raise

    def _await_updates(self) -> None:
        """Whoever asks for the next view ends this one: not while others' updates communicate."""
        if self.parked or not self._state.dirty:
            try:
                dist.barrier(group=self.job.group)
            except CommError as error:  # the next view says more
                self._timed_out = isinstance(error, CommTimeoutError)

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
                self.job.hold_shard(self._whole_shard())
                view = self.job.recover(timeout, patience=self._patience(last))
            except CommTimeoutError:
                raise
            except CommError as error:  # a member was lost just when the view had formed
                self._failures.add(error, () if last is None else last.members)
                continue
            if self._take_in(view):
                return view
            last = view

    def _patience(self, last: View | None) -> timedelta | None:
        """With members that live and do not come to the next view; to the first they may be late:
        they load and compile.
        """
        if last is None:
            return None
        return self.job.limit if self._timed_out else self._step_timeout

    def _take_in(self, view: View) -> bool:
        """Bring all members to one state; False where that takes another view."""
        self.comparison = None
        self._note(view)
        try:
            self._repeats.compare(Wire(self.job.group))
            if self._replicas is not None:
                # Any member may be a sole holder until the view's first agreement, when all have
                # the state.
                self.job.await_frozen(range(view.size), self._frozen_timeout)
                self._catch_up(*self._replicas.follow(self.job, view, self._held()))
            if view.size < self._least_size() and not self._hands_on(view):
                self._await_newcomers(view)
                return False
            if not self.parked:
                self._share(view)
            self._timed_out = False
        except CommError as error:
            self._failures.add(error, view.members)
            self._timed_out = isinstance(error, CommTimeoutError)
            return False
        except (StateLostError, DivergenceError, RepeatedError):
            raise  # all find it in the same words of all: nobody waits, and an abort cut them short
        except BaseException as error:
            self.job.abort(f"view {view.number}: {type(error).__name__}: {error}")
            raise
        return True

    @property
    def _frozen_timeout(self) -> timedelta:
        """How long a member that freezes and is alone with its shard is waited for: less than a
        recover() waits.
        """
        return min(self._step_timeout, 0.8 * self.job.timeout)

    def _note_holders(self, answer: Answer | None) -> None:
        """An agreement says that all that train have the state of their shard."""
        if self._replicas is not None and answer is not None:
            self.job.await_frozen(self._replicas.alone, self._frozen_timeout)

    def _note_failure(self, error: CommError | None, view: View) -> None:
        """None: it was voted down, perhaps for want of a member that has ended the groups."""
        try:
            if error is None:
                self.job.check()
        except CommError as of_groups:
            error = of_groups
        if error is not None:
            self._repeats.note(error, view)

    def _whole_shard(self) -> int | None:
        """The part of the state that this member has a copy of; 0 where it is not sharded."""
        standing = self._state.standing
        if self._state.dirty or not standing.synced:
            return None
        return 0 if self._replicas is None else standing.shard if standing.shard >= 0 else None

    def _catch_up(self, step: int, over: bool) -> None:
        """A newcomer that is parked counts on from the others' steps, without their state."""
        self._over = self._over or over
        if self.parked and self._state.step < step:
            self._state.step, self._state.dirty = step, True

    @property
    def _drift(self) -> float:
        """Where gradients were equal in every step, members' own arithmetic alone can differ."""
        return self._state.drift if self._check == "gradients" else 0.0

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
        return Held(standing.replica, standing.shard, clean, state.step, standing.synced, self.over)

    def _await_newcomers(self, view: View) -> None:
        """Wait until somebody asks for a place, here or at another member."""
        until = monotonic() + self.job.timeout.total_seconds()
        while not (self.job.waiting() or self.job.is_over() or self.job.is_leaving()):
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
        self._sync(view, new=new, moved=moved)
        shard = None if place is None else place.shard
        self.comparison = Comparison(state, self._goal, self._check, shard)

    def _sync(self, view: View, *, new: bool, moved: bool) -> None:
        state, standing, place = self._state, self._state.standing, self.place
        report = sync(
            state,
            self._group,
            continuing=standing.synced and not moved,
            lineage=NO_LINEAGE if moved else state.lineage,
            step=state.step,
            dirty=state.dirty or new,
            allow_pickle=state.allow_pickle,
            shard=WHOLE if place is None else place.shard,
            drift=self._drift,
            over=self.over,
        )
        self.job.check()
        self._over = self._over or report.over
        standing.synced = True
        if place is not None:
            standing.replica, standing.shard = place.replica, place.shard
        self.job.hold_shard(self._whole_shard())
        state.lineage = view.lineage
        if report.drifted:
            warnings.warn(
                f"elastic job: view {view.number}: members on unlike processors? Tensors drifted "
                f"apart, most of all {report.drifted}, by {report.drift:.2g} of its norm; those "
                f"of rank {report.source} count",
                stacklevel=2,
            )
        view.phases["sync"] = report.elapsed
        tally.note_sync(report.nbytes, report.elapsed)
        self.job.log(
            f"view {view.number}: step {report.step}, the state of rank "
            f"{report.source}; sync {report.elapsed.total_seconds():.3f} s: {report.tensors} "
            f"tensors, {report.nbytes} bytes, to ranks {list(report.took)}"
        )
