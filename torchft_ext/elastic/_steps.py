"""The training loop: steps that count on all members or on none."""

from __future__ import annotations

from collections.abc import Callable, Generator
from datetime import timedelta

from torchft_ext.elastic._current import current
from torchft_ext.elastic._evidence import Check
from torchft_ext.elastic._goal import Goal
from torchft_ext.elastic._loop import Loop
from torchft_ext.elastic._replicas import Replicas
from torchft_ext.elastic._state import State
from torchft_ext.elastic._step import JobLike, Step
from torchft_ext.elastic._view import View

__all__ = ["steps"]


def steps(
    state: State,
    total: int | None = None,
    *,
    passes: int | None = None,
    job: JobLike | None = None,
    build: Callable[[View], object] | None = None,
    replicas: Replicas | None = None,
    step_timeout: timedelta | None = None,
    check: Check = "gradients",
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
    ends when `total` steps are committed, or one in which step.stop() was called, and all that
    train hold the result; or when this member has called job.leave() and the others know that. A
    member that holds the result raises nothing
    where others are lost after the last step.

    Args:
        state: what all members hold alike; `state.step` says where to begin.
        total: how many steps the run has.
        passes: in its place, how many passes over the data of the state's BatchSampler: the run is
            over with the step in which the last of them is complete.
        job: None: this process's.
        build: called with each new view before the state is synced, for what must be wrapped anew
            (FSDP2); it returns objects by name, which go into the state (State.put()). What was
            there under these names is copied into them.
        replicas: of sharded models. A parked member gets no steps, but votes, until it is needed;
            `build` is not called for it. It returns when the run is over, with a state that is
            dirty.
        step_timeout: how long a member waits for others that live: in an operation of a managed
            group, in commit(), and where one does not come to the next view. Then the generation
            ends on all members, and the next view is without the members whose programs have not
            come to it within the job's `limit`: they hang. This needs more than half of the voters
            (exactly half: where the view names a witness), `min_size` members, and a copy of every
            shard; otherwise all wait for the absent until the job's timeout. A shorter timeout of a
            group holds. After the last step a member that holds the result waits no longer for
            others. None: four fifths of the job's timeout.
        check: what members compare with every vote, so that one that holds something else is
            noticed in that step. "gradients": a few bits of each gradient. "state": a few bits of
            each parameter, as the update before has left it, for programs that combine gradients
            in commit(). Both with it: the number of the step, `total`, what samplers give, and the
            plain values of optimizers and schedulers; after the last step the whole state but for
            buffers of modules. Of devices' tensors four at a time. None: nothing.

    Raises:
        CommError: one step failed three times without a change of members; the last failure.
        NoQuorumError, NoProgressError, LeftOutError, StateLostError, DivergenceError: the job
            cannot go on here. DivergenceError names what differs, and is raised on all members.
        RepeatedError: an exception ended a second member in the same step as the first. On all.
        ElasticError: one step was voted down three times without a change of members.
        RuntimeError: a step was left without commit(), or was not entered.
        ValueError: there is no such `check`, or `step_timeout` is not positive; not one of `total`
            and `passes` was given, or passes without one BatchSampler in the state.

    Threads: the caller's only. Source: state.commit() of Horovod Elastic; here the
    members agree before the update, so that no state needs to be rolled back.
    """
    if check not in ("gradients", "state", None):
        raise ValueError(f"steps: check: expected 'gradients', 'state' or None, found {check!r}")
    of_job = job if job is not None else current()
    limit = 0.8 * of_job.timeout if step_timeout is None else step_timeout
    if step_timeout is not None and step_timeout <= timedelta(0):
        raise ValueError(f"steps: step_timeout: expected a positive one, found {step_timeout}")
    goal = Goal.of(state, total, passes)
    loop = Loop(state, goal, of_job, build, replicas, check, limit)
    with of_job.wait_at_most(limit):
        view: View | None = loop.first_view()
        while view is not None:
            if loop.over:
                view = loop.leave_together(view)
            elif loop.parked:
                view = loop.sit_out(view)
            else:
                step = Step(state, of_job, view, limit, loop.place, loop.comparison, goal)
                try:
                    yield step
                except GeneratorExit:
                    step.say_left()
                    raise
                view = loop.view_after(step)
