"""How the workers of a simple launcher learn who is left: examples/launcher_membership.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LIMIT = 30.0  # seconds; never reached


@pytest.fixture
def membership(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import launcher_membership

    return launcher_membership


class SlowLauncher(dist.HashStore):
    """A store in which a membership appears when somebody has looked for it in vain."""

    def __init__(self, publish) -> None:
        super().__init__()
        self.looks = 0
        self._publish = publish

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        if self.looks == 3:
            self._publish(self)
        return super().check(keys)


def test_rank_and_prefix_are_those_of_the_next_membership(membership):
    store, first = dist.HashStore(), membership.Membership.first(4)
    membership.publish(store, first.without(1))
    found, rank = membership.await_newer(store, first, 3, LIMIT)
    assert (found.number, found.prefix, found.world, rank) == (2, "generation/2", 3, 2)


def test_rank_is_followed_through_memberships_that_were_missed(membership):
    store, first = dist.HashStore(), membership.Membership.first(4)
    second = first.without(1)  # 0, 2 and 3 are its ranks 0, 1 and 2
    third = second.without(0)
    for each in (second, third):
        membership.publish(store, each)
    for before, after in {2: 0, 3: 1}.items():
        found, rank = membership.await_newer(store, first, before, LIMIT)
        assert (found, rank) == (third, after)


def test_membership_is_awaited_until_it_is_published(membership):
    first = membership.Membership.first(2)
    store = SlowLauncher(lambda store: membership.publish(store, first.without(0)))
    found, rank = membership.await_newer(store, first, 1, LIMIT)
    assert (found.number, found.world, rank) == (2, 1, 0)
    assert store.looks >= 3


def test_wait_for_a_membership_ends_at_its_limit(membership):
    first = membership.Membership.first(2)
    with pytest.raises(TimeoutError, match=r"no membership after 1 within 0\.05 s"):
        membership.await_newer(dist.HashStore(), first, 0, 0.05)


@pytest.mark.parametrize("lost", [[1], [0, 0]], ids=["at once", "in the second one"])
def test_worker_that_is_not_in_the_membership_is_told_so(membership, lost):
    store = dist.HashStore()
    first = newest = membership.Membership.first(3)
    for rank in lost:
        newest = newest.without(rank)
        membership.publish(store, newest)
    with pytest.raises(RuntimeError, match=r"this worker, rank \d before, is not in"):
        membership.await_newer(store, first, 1, LIMIT)
