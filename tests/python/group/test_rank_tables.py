"""Global ranks of groups other than the default one, after a group has changed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, World, values_of
from rankside import configure_next, join, kept

LIBRARIES = ("ft", "gloo")  # of the subgroup: the default group is ours


def make_subgroup(members: list[int], library: str) -> None:
    kept["subgroup"] = dist.new_group(members, backend=library)


def change(ranks: Pool, world: World, members: list[int]) -> World:
    """The default group's next generation: of these ranks of this world, in this order."""
    address, size = ranks.address(), len(members)
    values_of(
        [world.start(old, configure_next, address, new, size) for new, old in enumerate(members)]
    )
    return World(ranks, [world.workers[old] for old in members])


def table() -> list[int]:
    return dist.get_process_group_ranks(kept["subgroup"])


def pass_on(source: int, target: int, value: float) -> float | None:
    """From one global rank to another, through the subgroup."""
    tensor = torch.zeros(1)
    if dist.get_rank() == source:
        dist.send(torch.tensor([value]), target, group=kept["subgroup"])
    elif dist.get_rank() == target:
        dist.recv(tensor, source, group=kept["subgroup"])
        return tensor.item()
    return None


def send_fails(target: int) -> str:
    with pytest.raises(ValueError) as raised:
        dist.send(torch.ones(1), target, group=kept["subgroup"])
    return str(raised.value)


@pytest.mark.parametrize("library", LIBRARIES)
def test_subgroup_is_addressed_by_the_default_groups_new_ranks(ranks, library):
    world = ranks.fresh(4)
    world.run(make_subgroup, [0, 2], library)
    smaller = change(ranks, world, [0, 2, 3])
    assert [smaller.on(rank, table) for rank in (0, 1)] == [[0, 1], [0, 1]]
    assert smaller.run(pass_on, 0, 1, 7.0) == [None, 7.0, None]
    alone = change(ranks, smaller, [0, 2])
    assert alone.on(0, table) == [0, -2]
    smaller = change(ranks, World(ranks, smaller.workers), [0, 1, 2])
    assert [smaller.on(rank, table) for rank in (0, 1)] == [[0, 1], [0, 1]]
    backwards = change(ranks, smaller, [2, 1, 0])
    assert [backwards.on(rank, table) for rank in (1, 2)] == [[2, 1], [2, 1]]
    assert backwards.run(pass_on, 2, 1, 8.0) == [None, 8.0, None]


@pytest.mark.parametrize("library", LIBRARIES)
def test_member_that_is_in_no_generation_of_the_default_group_has_no_global_rank(ranks, library):
    world = ranks.fresh(3)
    world.run(make_subgroup, [0, 1], library)
    others = change(ranks, world, [0, 2])
    assert others.on(0, table) == [0, -2]
    assert "1" in others.on(0, send_fails, 1)


@pytest.mark.parametrize("library", LIBRARIES)
def test_newcomer_takes_no_subgroup_members_global_rank(ranks, library):
    world = ranks.fresh(2)
    world.run(make_subgroup, [0, 1], library)
    (newcomer,) = ranks.borrow(1, besides=world.workers)
    address = ranks.address()
    calls = [
        world.start(0, configure_next, address, 0, 2),
        newcomer.call(join, (address, 1, 2), {}),
    ]
    values_of(calls)
    assert world.on(0, table) == [0, -2]


def configure_subgroup(address: str, rank: int, size: int) -> list[int]:
    import torchft_ext

    torchft_ext.backend(kept["subgroup"]).configure(address, rank, size)
    return table()


def test_subgroup_that_changes_itself_is_addressed_by_global_ranks(ranks):
    world = ranks.fresh(4)
    world.run(make_subgroup, [0, 1, 3], "ft")
    address = ranks.address()
    calls = [world.start(old, configure_subgroup, address, new, 2) for new, old in ((0, 3), (1, 1))]
    assert [call.value() for call in calls] == [[3, 1], [3, 1]]
    assert world.run(pass_on, 3, 1, 9.0) == [None, 9.0, None, None]


def test_our_subgroup_of_another_librarys_default_group_keeps_its_global_ranks(ranks):
    world = ranks.fresh(3, backend_name="gloo")
    world.run(make_subgroup, [0, 1, 2], "ft")
    address = ranks.address()
    calls = [world.start(old, configure_subgroup, address, new, 2) for new, old in ((0, 2), (1, 0))]
    assert [call.value() for call in calls] == [[2, 0], [2, 0]]
    address = ranks.address()
    calls = [world.start(rank, configure_subgroup, address, rank, 3) for rank in range(3)]
    assert [call.value() for call in calls[::2]] == [[0, 1, 2], [0, 1, 2]]
