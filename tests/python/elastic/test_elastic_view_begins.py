"""torchft_ext.elastic.steps() when a view begins: the model is built, the state is synced."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from fake_job import LOST, ME, FakeReplicas, LosingBuild, a_job, a_state

from torchft_ext.elastic._errors import StateLostError
from torchft_ext.elastic._replicas import Held, Place
from torchft_ext.elastic._steps import steps
from torchft_ext.elastic._view import Answer, View

job = pytest.fixture(a_job)
state = pytest.fixture(a_state)


def test_model_is_built_for_each_view_before_the_sync(job, state):
    built = []
    job.answers = [Answer(True, waiting=("cc",))]

    def build(view: View) -> None:
        built.append((view.number, state.lineage != bytes(16)))

    for step in steps(state, 2, job=job, build=build):
        with step:
            step.commit()
    assert built == [(1, False), (2, True)]


def test_sync_that_fails_is_tried_in_the_next_view(job, state):
    assert next(steps(state, 1, job=job, build=LosingBuild())).view.number == 2


def test_newcomer_without_the_jobs_state_never_passes_its_own_on(job, state):
    job.continuing = [True]  # the other one holds the job's state; it dies before the sync
    job.members = [(ME, "bb"), (ME,)]
    with pytest.raises(StateLostError):
        next(steps(state, 1, job=job, build=LosingBuild()))


class MovingReplicas(FakeReplicas):
    """Of two shards: one after the other is this member's. `told` is what it brought each time."""

    def __init__(self, *shards: int) -> None:
        super().__init__(None)
        self.shards_here, self.told = list(shards), list[Held]()

    def follow(self, job: object, view: View, held: Held) -> tuple[int, bool]:
        self.told.append(held)
        self.place = Place(0, self.shards_here.pop(0), 0, 1)
        return 0, False


def test_member_on_its_way_to_another_shard_holds_none(job, state):
    """Its objects were made anew for the other one, which it has not got yet."""
    replicas = MovingReplicas(0, 1, 0)
    job.members = [(ME,)]

    def build(view: View) -> None:
        if view.number == 2:
            raise LOST

    with pytest.raises(StateLostError):
        for step in steps(state, 2, job=job, replicas=replicas, build=build):
            with step:
                job.fail()
    assert [(held.shard, held.clean) for held in replicas.told] == [
        (-1, False),
        (0, True),
        (0, False),
    ]


def test_founder_whose_first_view_did_not_form_may_begin_the_job(job, state):
    job.recover()
    job.members = [(ME,)]
    assert next(steps(state, 1, job=job, build=LosingBuild())).view.number == 2


def test_view_says_how_long_the_sync_took(job, state):
    assert next(steps(state, 1, job=job)).view.phases["sync"] > timedelta(0)
    (line,) = job.lines
    assert re.fullmatch(
        r"view 1: step 0, the state of rank 0; sync \d+\.\d{3} s: "
        r"0 tensors, 0 bytes, to ranks \[\]",
        line,
    )
