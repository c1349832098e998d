"""torchft_ext.elastic.steps() at the end: who holds the result stays for one that lacks it."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

import pytest
from fake_job import LOST, ME, FakeJob, FakeReplicas, a_job, a_state, commit_all

import torchft_ext
from torchft_ext.elastic._errors import ElasticError, LeftOutError, NoQuorumError, StateLostError
from torchft_ext.elastic._replicas import Place
from torchft_ext.elastic._state import State
from torchft_ext.elastic._steps import steps
from torchft_ext.elastic._view import Answer

job = pytest.fixture(a_job)
state = pytest.fixture(a_state)


def test_member_that_holds_the_result_stays_for_one_that_lacks_it(job, state):
    job.answers = [Answer(True), Answer(False)]  # the second: the other one's update failed
    commit_all(state, job, 1)
    assert job.events == ["recover", "agree", "agree", "recover", "agree"]
    assert (state.step, state.dirty) == (1, False)
    assert job.ends == [True]  # once, when all hold it


def test_member_that_leaves_before_the_end_does_not_take_the_job_for_over(job, state):
    job.answers = [Answer(True, leaving=(ME,))]
    commit_all(state, job, 2)
    assert state.step == 1 and job.ends == []


@pytest.mark.parametrize("error", [NoQuorumError, LeftOutError, ElasticError])
def test_member_that_holds_the_result_goes_where_nobody_needs_it(job, state, error):
    job.answers = [Answer(True), error("nobody answers")]
    commit_all(state, job, 1)
    assert state.step == 1 and "nobody answers" in job.lines[-1]
    assert job.ends == [False]  # known here, and not agreed on


GONE = [NoQuorumError, LeftOutError, torchft_ext.CommTimeoutError]


@pytest.mark.parametrize("error", GONE)
def test_member_that_holds_the_result_goes_where_no_view_follows(job, state, error):
    job.answers = [Answer(True), Answer(False)]
    end_with_recoveries(job, state, [error("nobody is left")])
    assert state.step == 1 and not state.dirty and "nobody is left" in job.lines[-1]
    assert job.events == ["recover", "agree", "agree", "recover"]  # no abort


def end_with_recoveries(job: FakeJob, state: State, errors: list[Exception]) -> None:
    """One step; the errors are those of recover() after it."""
    for step in steps(state, 1, job=job):
        with step:
            job.recoveries = errors
            step.commit()


def test_member_that_holds_the_result_does_not_try_for_ever(job, state):
    job.answers = [Answer(True), Answer(False)]
    end_with_recoveries(job, state, [LOST] * 9)
    assert state.step == 1 and job.events[3:] == ["recover"] * 3


def test_result_is_handed_on_in_a_view_too_small_to_train(job, state):
    job.min_size, job.newcomers, job.timeout = 2, [], timedelta(0)
    job.members = [(ME, "bb"), (ME,)]
    job.answers = [Answer(True), Answer(False)]
    commit_all(state, job, 1)
    assert job.events == ["recover", "agree", "agree", "recover", "agree"]
    assert not state.dirty


@pytest.mark.parametrize("held", ["clean", "dirty"])
def test_view_that_holds_no_whole_result_keeps_nobody_waiting(job, state, held):
    job.newcomers, job.timeout = [], timedelta(0)
    job.members = [(ME, "bb"), (ME,)]
    job.answers = [Answer(True), Answer(False)]
    replicas = FakeReplicas(Place(0, 0, 0, 1))
    with nullcontext() if held == "clean" else pytest.raises(StateLostError):
        for step in steps(state, 1, job=job, replicas=replicas):
            with step:
                step.commit(*([job.fail] if held == "dirty" else []))
            replicas.shards = 2  # too many for the next view
    assert state.dirty == (held == "dirty")
    assert job.events == ["recover", "agree", "agree", "recover"]  # no abort


@pytest.mark.parametrize("error", GONE)
def test_parked_member_goes_where_no_view_follows(job, state, error):
    job.answers = [Answer(False), Answer(True), Answer(False)]
    job.recover()
    job.recoveries = [error("nobody is left")]  # of the next call
    loop = steps(state, 1, job=job, replicas=FakeReplicas(None))
    assert list(loop) == [] and "nobody is left" in job.lines[-1]
    assert job.events == ["recover", "agree", "agree", "agree", "recover"]


def test_member_that_holds_the_result_awaits_a_view_no_longer_than_an_agreement(job, state):
    job.answers = [Answer(True), Answer(False)]
    for step in steps(state, 1, job=job, step_timeout=timedelta(seconds=3)):
        with step:
            step.commit()
    assert job.limits == [None, timedelta(seconds=3)]


@pytest.mark.parametrize("error", GONE)
def test_member_that_lacks_the_result_is_told_so(job, state, error):
    job.answers = [Answer(True), Answer(False)]
    with pytest.raises(error):
        for step in steps(state, 1, job=job):
            with step:
                job.recoveries = [error("nobody is left")]
                step.commit(job.fail)
    assert state.dirty


def test_member_that_leaves_is_not_told_that_it_lacks_the_result(job, state):
    job.answers = [Answer(True), Answer(False)]
    for step in steps(state, 1, job=job):
        with step:
            job.leaving = True
            job.recoveries = [LeftOutError("view 2 is without this member")]
            step.commit(job.fail)
    assert state.dirty and "without this member" in job.lines[-1]


def test_member_that_lacks_the_result_is_told_so_without_a_quorum(job, state):
    job.answers = [Answer(True), NoQuorumError("nobody answers")]
    with pytest.raises(NoQuorumError):
        for step in steps(state, 1, job=job):
            with step:
                step.commit(job.fail)
    assert state.dirty
