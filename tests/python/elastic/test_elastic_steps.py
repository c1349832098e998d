"""torchft_ext.elastic.steps(): a step counts or is repeated, whatever happens to the members.

Here with a job of one process that does what a test says; test_elastic_sync.py has several ranks.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from fake_job import LOST, ME, FakeReplicas, a_job, a_state

import torchft_ext
from torchft_ext.elastic import _current
from torchft_ext.elastic._errors import ElasticError, LeftOutError, StateLostError
from torchft_ext.elastic._replicas import Place
from torchft_ext.elastic._sampler import BatchSampler
from torchft_ext.elastic._state import State
from torchft_ext.elastic._steps import steps
from torchft_ext.elastic._view import Answer

job = pytest.fixture(a_job)
state = pytest.fixture(a_state)


def sampler_of(state: State) -> BatchSampler:
    sampler = state.objects["batchsampler"]
    assert isinstance(sampler, BatchSampler)
    return sampler


def forward(state: State) -> None:
    state.objects["model"](torch.randn(4, 1)).sum().backward()


def test_every_step_is_committed_once(job, state):
    numbers, updates = [], []
    for step in steps(state, 3, job=job):
        with step:
            assert state.objects["model"][0].weight.grad is None
            forward(state)
            assert step.commit(state.objects["optimizer"].step, lambda: updates.append(1)) is True
        numbers.append(step.number)
    assert numbers == [0, 1, 2] and len(updates) == 3
    assert (state.step, state.dirty, state.lineage) == (3, False, b"lineage 16 bytes")
    assert sampler_of(state).position == 3 * 2 * 2  # two members
    assert job.events == ["recover"] + ["agree"] * 4  # the last: all hold the result


def test_job_of_the_process_is_the_default(job, state):
    with pytest.raises(RuntimeError, match=r"call elastic\.join"):
        next(steps(state, 1))
    _current.remember(job)
    try:
        assert next(steps(state, 1)).view.number == 1
    finally:
        _current.forget(job)


def test_view_that_is_there_already_is_used(job, state):
    job.recover()
    assert next(steps(state, 1, job=job)).view.number == 1
    assert job.events == ["recover"]


def test_nothing_is_left_to_do_after_total_steps(job, state):
    state.step = 5
    assert list(steps(state, 5, job=job)) == []


def test_failed_step_is_yielded_again_as_at_its_begin(job, state):
    job.members = [(ME, "bb"), (ME,)]
    tries = []
    for step in steps(state, 1, job=job):
        with step:
            assert state.objects["model"][0].weight.grad is None
            buffers = {name: b.clone() for name, b in state.objects["model"].named_buffers()}
            tries.append((step.number, step.view.size, sampler_of(state).indices(), buffers))
            forward(state)
            if len(tries) == 1:
                job.fail()
            step.commit()
    (first, second) = tries
    assert first[:2] == (0, 2) and second[:2] == (0, 1) and first[2] == second[2]
    assert all(torch.equal(first[3][name], second[3][name]) for name in first[3])
    assert (state.step, sampler_of(state).position) == (1, 2)
    assert job.events == ["recover", "recover", "agree", "agree"]


@pytest.mark.parametrize("commits_first", [False, True])
def test_failed_validation_leaves_the_model_in_training(job, state, commits_first):
    model, modes = state.objects["model"], []
    for step in steps(state, 2, job=job):
        with step:
            modes.append([module.training for module in model.modules()])
            if commits_first:
                step.commit()
            if len(modes) == 1:
                model.eval()
                job.fail()
            if not commits_first:
                step.commit()
    assert modes == [[True, True, True]] * (2 if commits_first else 3)


def test_repeated_step_draws_the_same_numbers(job, state):
    drawn = []
    for step in steps(state, 2, job=job):
        with step:
            step.manual_seed(1)
            drawn.append(torch.rand(3).tolist())
            if len(drawn) == 1:
                job.fail()
            step.commit()
    assert drawn[0] == drawn[1] != drawn[2]


def test_prefetched_batches_of_a_failed_step_are_stale(job, state):
    resets = []
    for step in steps(state, 1, job=job):
        with step:
            resets.append(sampler_of(state).resets)
            if len(resets) == 1:
                job.fail()
            step.commit()
    assert resets[0] != resets[1]


def test_failure_of_the_agreement_repeats_the_step(job, state):
    job.answers = [torchft_ext.CommAbortedError("the view is over")]
    updates = []
    for step in steps(state, 1, job=job):
        with step:
            step.commit(lambda: updates.append(1))
    assert len(updates) == 1
    assert job.events == ["recover", "agree", "recover", "agree", "agree"]


def test_step_that_was_voted_down_is_repeated_in_the_same_view(job, state):
    job.answers = [Answer(False)]
    said, updates = [], []
    for step in steps(state, 1, job=job):
        with step:
            said.append(step.commit(lambda: updates.append(1)))
    assert said == [False, True] and len(updates) == 1
    assert job.events == ["recover", "agree", "agree", "agree"]


def test_third_failure_of_the_same_members_is_raised(job, state):
    errors = [torchft_ext.PeerLostError(str(number)) for number in range(3)]
    with pytest.raises(torchft_ext.PeerLostError, match="2"):
        for number, step in enumerate(steps(state, 1, job=job)):
            with step:
                job.fail(errors[number])
    assert job.events == ["recover"] * 3


def test_failures_of_other_members_are_counted_anew(job, state):
    job.members = [(ME, "bb"), (ME, "bb"), (ME, "cc"), (ME, "cc"), (ME, "dd")]
    tries = 0
    for step in steps(state, 1, job=job):
        with step:
            tries += 1
            if tries < 5:
                job.fail()
            step.commit()
    assert tries == 5 and state.step == 1


def test_third_vote_against_a_step_is_raised(job, state):
    job.answers = [Answer(False)] * 3
    with pytest.raises(ElasticError, match="step 0 was voted down"):
        for step in steps(state, 1, job=job):
            with step:
                step.commit()


def test_a_committed_step_forgets_the_failures_before_it(job, state):
    tries = 0
    for step in steps(state, 3, job=job):
        with step:
            tries += 1
            if tries % 3:  # two failures, then a commit
                job.fail()
            step.commit()
    assert state.step == 3


@pytest.mark.parametrize(
    "answer",
    [
        Answer(True, waiting=("cc",)),
        Answer(True, leaving=("bb",)),
        Answer(True, new_witness=True),
    ],
)
def test_members_change_at_the_boundary_after_the_agreement(job, state, answer):
    job.members = [(ME, "bb"), (ME, "cc")]
    job.answers = [answer]
    members = []
    for step in steps(state, 2, job=job):
        with step:
            members.append(step.view.members)
            step.commit()
    assert members == [(ME, "bb"), (ME, "cc")]
    assert job.events == ["recover", "agree", "recover", "agree", "agree"]


def test_loop_ends_for_the_member_that_leaves(job, state):
    job.answers = [Answer(True), Answer(True, leaving=(ME,))]
    for step in steps(state, 9, job=job):
        with step:
            step.commit()
    assert state.step == 2 and job.events == ["recover", "agree", "agree"]


def be_left_out(job, state) -> None:
    """After the first step, which the others have agreed on before they knew of this member."""
    for step in steps(state, 9, job=job):
        with step:
            step.commit()
            job.failure = LOST
            job.recoveries = [LeftOutError("view 2 is without this member")]


def test_loop_ends_where_the_next_view_is_without_the_member_that_leaves(job, state):
    job.leaving = True
    be_left_out(job, state)
    assert state.step == 1 and job.events == ["recover", "agree", "recover"]


def test_loop_ends_for_a_member_that_leaves_before_its_first_view(job, state):
    job.leaving = True
    job.recoveries = [LeftOutError("view 2 is without this member")]
    assert list(steps(state, 9, job=job)) == []


def test_member_that_leaves_awaits_no_newcomers(job, state):
    def leave() -> list[str]:
        job.leaving = True
        job.recoveries = [LeftOutError("view 2 is without this member")]
        return []

    job.min_size, job.members, job.waiting = 2, [(ME,)], leave
    assert list(steps(state, 9, job=job)) == []
    assert job.events == ["recover"] * 2


def test_loop_of_a_member_that_is_left_out_and_stays_raises(job, state):
    with pytest.raises(LeftOutError):
        be_left_out(job, state)


def test_all_may_be_alone_with_their_shard_until_an_agreement_says_that_all_have_theirs(job, state):
    replicas = FakeReplicas(Place(0, 0, 0, 1))
    replicas.alone = (0,)
    run = steps(state, 2, job=job, replicas=replicas, step_timeout=timedelta(seconds=3))
    assert job.awaited == []
    step = next(run)
    assert job.awaited == [((), 3), ((0, 1), 3)]
    with step:
        step.commit()
    next(run)
    assert job.awaited[2:] == [((0,), 3)]


def test_view_below_min_size_waits_for_the_next(job, state):
    job.min_size = 2
    job.members = [(ME,), (ME,), (ME, "bb")]
    assert next(steps(state, 1, job=job)).view.size == 2
    assert job.events == ["recover"] * 3


def test_view_that_is_over_is_followed_before_the_next_step(job, state):
    for step in steps(state, 2, job=job):
        with step:
            step.commit()
            job.failure = LOST  # noticed by nobody
    assert job.events == ["recover", "agree", "recover", "agree", "agree"]  # none after the last


def test_failed_update_leaves_the_step_committed_and_the_state_dirty(job, state):
    seen = []
    with pytest.raises(StateLostError):  # there is no other member to take it from
        for step in steps(state, 1, job=job):
            with step:
                step.commit(job.fail)
                seen.append("after")
            seen.append((step.committed, step.failure, state.step, state.dirty))
    assert seen == [(True, LOST, 0, True)]
    assert job.events[1:4] == ["agree", "agree", "recover"]
    assert job.events[-1] == "recover"  # no abort: it would cut the others' exchange short


def test_other_errors_of_an_update_pass_through_and_leave_the_state_dirty(job, state):
    def fail() -> None:
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError):
        for step in steps(state, 1, job=job):
            with step:
                step.commit(fail)
    assert state.dirty and job.events[-1] == "abort step 0: ZeroDivisionError: of the user"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("of the user"), "ValueError: of the user"),
        (KeyboardInterrupt(), "it ended by KeyboardInterrupt: "),  # of this process alone
    ],
)
def test_other_errors_end_the_generation_and_pass_through(job, state, error, told):
    with pytest.raises(type(error)):
        for step in steps(state, 1, job=job):
            with step:
                raise error
    assert job.events[-1] == f"abort step 0: {told}"


def test_failure_of_a_group_that_is_not_managed_passes_through(job, state):
    with pytest.raises(torchft_ext.PeerLostError):
        for step in steps(state, 1, job=job):
            with step:
                raise LOST  # the managed groups are well
    assert job.events[-1].startswith("abort step 0: PeerLostError")


def test_leaving_a_step_without_commit_is_an_error(job, state):
    with pytest.raises(RuntimeError, match=r"step 0: the block ended without commit\(\)"):
        for step in steps(state, 1, job=job):
            with step:
                forward(state)
    assert job.events[-1].startswith("abort step 0: the block ended without commit()")


def test_step_that_is_not_entered_is_an_error(job, state):
    with pytest.raises(RuntimeError, match="step 0: it was not entered"):
        for _ in steps(state, 1, job=job):
            pass


def test_commit_belongs_once_into_the_block(job, state):
    step = next(steps(state, 1, job=job))
    with pytest.raises(RuntimeError, match="belongs into its `with` block"):
        step.commit()
    with step:
        step.commit()
        with pytest.raises(RuntimeError, match="called twice"):
            step.commit()
    with pytest.raises(RuntimeError, match="entered once"), step:
        pass


def test_functions_that_were_called_already_are_refused_before_the_agreement(job, state):
    with pytest.raises(TypeError, match=r"expected functions, .*, found None"):
        for step in steps(state, 1, job=job):
            with step:
                step.commit(state.objects["optimizer"].step())
    assert "agree" not in job.events and job.events[-1].startswith("abort step 0: TypeError")


def test_failure_after_the_commit_keeps_it(job, state):
    for step in steps(state, 2, job=job):
        with step:
            step.commit()
            if step.number == 0:
                job.fail()
    assert state.step == 2
    assert job.events == ["recover", "agree", "recover", "agree", "agree"]


def test_member_lost_just_when_the_view_had_formed_is_another_try(job, state):
    job.recoveries = [LOST, LOST]
    assert next(steps(state, 1, job=job)).view.number == 1
    job.recoveries = [torchft_ext.CommTimeoutError("nobody came")]
    job._view = None
    with pytest.raises(torchft_ext.CommTimeoutError):
        next(steps(state, 1, job=job))
