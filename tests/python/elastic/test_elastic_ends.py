"""torchft_ext.elastic.steps(): how long a run goes on: steps, passes over the data, or a word."""

from __future__ import annotations

import pytest
from fake_job import FakeReplicas, a_job, a_state, commit_all
from torch import nn

from torchft_ext.elastic._sampler import BatchSampler
from torchft_ext.elastic._state import State
from torchft_ext.elastic._steps import steps
from torchft_ext.elastic._view import Answer

job = pytest.fixture(a_job)
state = pytest.fixture(a_state)

A_PASS = 25  # steps: 100 samples, two members with 2 of each step


def test_run_of_some_passes_ends_with_the_step_that_completes_them(job, state):
    epochs = []
    for step in steps(state, passes=2, job=job):
        with step:
            epochs.append((step.epoch, step.is_last_of_epoch))
            step.commit()
    assert state.step == 2 * A_PASS
    of_a_pass = [False] * (A_PASS - 1) + [True]
    assert epochs == [(number, last) for number in range(2) for last in of_a_pass]
    assert job.last == [False] * (2 * A_PASS - 1) + [True, False]  # the last: on the result


def test_pass_that_ends_within_a_step_ends_with_it(job):
    sampler = BatchSampler(10, 2)
    ends = []
    for step in steps(State(sampler), passes=2, job=job):
        with step:
            ends.append(step.is_last_of_epoch)
            step.commit()
    assert ends == [False, False, True, False, True]  # after 4, 8, 12, 16, 20 samples


def test_run_that_has_made_its_passes_has_no_steps(job, state):
    state.sampler.load_state_dict({**state.sampler.state_dict(), "position": 200})
    assert list(steps(state, passes=2, job=job)) == []


@pytest.mark.parametrize("given", [{}, {"total": 1, "passes": 1}])
def test_one_of_total_and_passes_is_given(job, state, given):
    with pytest.raises(ValueError, match="expected total= or passes=, and not both"):
        next(steps(state, job=job, **given))


def test_passes_need_one_sampler(job):
    with pytest.raises(ValueError, match="expected one BatchSampler in the state"):
        next(steps(State(nn.Linear(1, 1)), passes=1, job=job))


def test_epochs_need_one_sampler(job):
    run = steps(State(nn.Linear(1, 1)), 1, job=job)
    with next(run) as step:
        with pytest.raises(RuntimeError, match=r"step\.epoch: expected one BatchSampler"):
            _ = step.epoch
        step.commit()


def test_stop_ends_the_run_after_the_step(job, state):
    for step in steps(state, 10, job=job):
        with step:
            if step.number == 3:
                step.stop()
            step.commit()
    assert state.step == 4 and job.last[:4] == [False, False, False, True]
    assert job.events[-2:] == ["agree", "agree"]  # on the step, and on the result


def test_stop_of_another_member_ends_it_here(job, state):
    job.answers = [Answer(True), Answer(True, last=True)]
    commit_all(state, job, 10)
    assert state.step == 2


@pytest.mark.parametrize("end", ["no", "lost"])
def test_stop_in_a_step_that_does_not_count_is_forgotten(job, state, end):
    tries = []
    for step in steps(state, 3, job=job):
        with step:
            tries.append(step.number)
            if len(tries) == 1:
                step.stop()
                if end == "no":
                    job.answers = [Answer(False)]
                else:
                    job.fail()
            step.commit()
    assert tries == [0, 0, 1, 2]


def test_parked_member_ends_with_the_run(job, state):
    job.answers = [Answer(True), Answer(True, last=True)]
    assert list(steps(state, 10, job=job, replicas=FakeReplicas(None))) == []
    assert state.dirty and state.step == 2


def test_stop_belongs_before_commit(job, state):
    step = next(steps(state, 10, job=job))
    with step:
        step.commit()
        with pytest.raises(RuntimeError, match=r"step 0: stop\(\) belongs before commit\(\)"):
            step.stop()


def test_break_is_said(job, state):
    with pytest.warns(UserWarning, match=r"left at step 1.*step.stop\(\)"):
        for step in steps(state, 10, job=job):
            with step:
                step.commit()
            if step.number == 1:
                break


@pytest.mark.parametrize("ending", ["stop", "total"])
@pytest.mark.filterwarnings("error")
def test_break_after_the_last_step_is_right(job, state, ending):
    for step in steps(state, 10 if ending == "stop" else 2, job=job):
        with step:
            if step.number == 1 and ending == "stop":
                step.stop()
            step.commit()
        if step.number == 1:
            break


@pytest.mark.filterwarnings("error")
def test_error_of_the_block_says_enough(job, state):
    with pytest.raises(ZeroDivisionError):
        for step in steps(state, 10, job=job):
            with step:
                raise ZeroDivisionError
