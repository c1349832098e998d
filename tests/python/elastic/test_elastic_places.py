"""Who trains in which replica and shard, as a pure function of what the members hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from torchft_ext.elastic._errors import StateLostError
from torchft_ext.elastic._replicas import Held, arrange


def holding(*pairs: tuple[int, int], step: int = 3) -> list[Held]:
    """Members that hold (replica, shard) of the job's newest step; (-1, -1): newcomers."""
    return [Held(r, s, s >= 0, step if s >= 0 else 0, s >= 0) for r, s in pairs]


def grid(held: Sequence[Held], shards: int = 2) -> list[tuple[int, int] | None]:
    places = arrange(shards, held)
    return [None if place is None else (place.replica, place.shard) for place in places]


def test_founders_become_replicas_in_the_order_of_their_ranks():
    assert grid([Held()] * 5) == [(0, 0), (0, 1), (1, 0), (1, 1), None]
    ranks = [(place.rank, place.size) for place in arrange(2, [Held()] * 4)]
    assert ranks == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_whole_replicas_stay_and_the_rest_of_a_broken_one_is_parked():
    assert grid(holding((0, 0), (1, 0), (1, 1))) == [None, (0, 0), (0, 1)]
    assert grid(holding((0, 1), (1, 0), (1, 1), (2, 0), (2, 1)))[0] is None


def test_newcomer_takes_the_missing_shard_of_a_broken_replica():
    assert grid(holding((0, 0), (1, 0), (1, 1), (-1, -1))) == [(1, 0), (0, 0), (0, 1), (1, 1)]


def test_two_broken_replicas_make_a_whole_one():
    assert grid(holding((0, 1), (1, 0))) == [(0, 1), (0, 0)]


def test_a_holder_too_many_takes_another_shard():
    assert grid(holding((0, 0), (1, 0), (2, 0), (2, 1))) == [(1, 0), (1, 1), (0, 0), (0, 1)]


def test_parked_member_that_missed_a_step_does_not_count_as_a_holder():
    stale = Held(0, 0, False, 5, True)
    assert grid([stale, *holding((1, 0), (1, 1), step=5)]) == [None, (0, 0), (0, 1)]
    with pytest.raises(StateLostError, match="none of 2 members holds shard 0 of 2"):
        arrange(2, [stale, *holding((1, 1), step=5)])


def test_a_shard_without_a_holder_is_a_lost_state():
    for held in (holding((0, 0), (1, 0)), holding((0, 0), (-1, -1)), holding((0, 0))):
        with pytest.raises(StateLostError, match="holds shard 1 of 2"):
            arrange(2, held)


def test_too_few_members_are_all_parked():
    assert grid([Held()] * 3, shards=4) == [None] * 3
