"""Groups made of a group's members: split_group() of a ProcessGroup, and shrink_group()."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Call, Pool, World, values_of
from rankside import (
    OPERATION_LIMIT,
    abort,
    backend,
    configure_next,
    connected_store,
    kept,
    seconds,
    wait_errored,
)
from test_generations import together
from torch.distributed import distributed_c10d as c10d

import torchft_ext


def sum_of_ranks(group: dist.ProcessGroup, contribution: int) -> int:
    tensor = torch.tensor([contribution])
    group.allreduce([tensor]).wait()
    return int(tensor.item())


def split(members: list[int], limit: float = OPERATION_LIMIT) -> tuple[int, int, int] | None:
    """Rank and size in the new group, and the sum of its members' ranks in the old one."""
    world = c10d._get_default_group()
    group = world.split_group(members, timeout=seconds(limit), group_name=f"of{members[0]}")
    if group is None:
        return None
    kept["split"] = group
    return group.rank(), group.size(), sum_of_ranks(group, world.rank())


def split_in_halves() -> tuple[int, int, int] | None:
    size = dist.get_world_size()
    first, second = list(range(size // 2)), list(range(size // 2, size))
    return split(first if dist.get_rank() in first else second)


def test_split_group_gives_groups_of_some(ranks):
    world = ranks.world(4)
    assert world.run(split_in_halves) == [(0, 2, 1), (1, 2, 1), (0, 2, 5), (1, 2, 5)]
    # In the order given, as torch has it since 2.14; before, its split_group() sorts them.
    assert world.run(split, [3, 1]) == [None, (1, 2, 4), None, (0, 2, 4)]
    assert world.run(split, [0, 1, 2, 3]) == [(rank, 4, 6) for rank in range(4)]


def test_split_group_may_be_made_again_under_its_name(ranks):
    world = ranks.world(2)
    for _ in range(3):
        assert world.run(split, [0, 1]) == [(0, 2, 1), (1, 2, 1)]


def resize_split(address: str, rank: int, size: int) -> tuple[int, int, int]:
    import torchft_ext

    group = kept["split"]
    assert isinstance(group, dist.ProcessGroup)
    torchft_ext.backend(group).configure(address, rank, size)
    return group.rank(), group.size(), sum_of_ranks(group, 7)


def sum_in_split() -> int:
    group = kept["split"]
    assert isinstance(group, dist.ProcessGroup)
    return sum_of_ranks(group, 1)


def test_split_group_has_generations_of_its_own(ranks):
    world = ranks.world(4)
    world.run(split_in_halves)
    world.kill(3)
    world.start(2, sum_in_split).error("PeerLostError")
    halves = [world.start(rank, sum_in_split) for rank in (0, 1)]
    assert [half.value() for half in halves] == [2, 2]
    assert world.on(2, resize_split, ranks.address(), 0, 1) == (0, 1, 7)


def split_options() -> tuple[object, object]:
    import torchft_ext

    split([0, 1], limit=33)
    group = kept["split"]
    assert isinstance(group, dist.ProcessGroup)
    options = torchft_ext.backend(group).options
    assert isinstance(options, torchft_ext.Options)
    own = backend().options
    assert isinstance(own, torchft_ext.Options)
    assert own._timeout == seconds(OPERATION_LIMIT), "the parent's own have changed"
    return options.heartbeat, options._timeout


def test_split_group_inherits_options_and_takes_the_timeout(ranks):
    world = ranks.world(2, heartbeat=seconds(21))
    assert world.run(split_options) == [(seconds(21), seconds(33))] * 2


def split_after_failure() -> None:
    wait_errored()
    split([0, 1])


def test_split_of_a_failed_generation_raises_its_failure(ranks):
    world = ranks.world(3)
    world.kill(2)
    for call in [world.start(rank, split_after_failure) for rank in (0, 1)]:
        assert call.error("PeerLostError").cause["rank"] == 2


def test_death_of_a_member_is_told_to_those_who_wait_for_it_in_split(ranks):
    world = ranks.world(3)
    calls = [world.start_side(rank, split, [0, 1, 2]) for rank in (0, 1)]
    world.kill(2)
    for call in calls:
        assert call.error("PeerLostError", patience=OPERATION_LIMIT / 2).cause["rank"] == 2


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([], "expected at least one rank, found none"),
        ([0, 5], "expected ranks from 0 to 1, found 5"),
        ([-1], "expected ranks from 0 to 1, found -1"),
        ([1, 1], "expected each rank once, found 1 twice"),
    ],
)
def test_split_refuses_what_is_no_list_of_members(ranks, members, expected):
    world = ranks.world(2)
    calls = [world.start(rank, split_of, members) for rank in range(2)]
    for call in calls:
        assert expected in call.error("ValueError").text
    assert world.run(split, [0, 1]) == [(0, 2, 1), (1, 2, 1)]


def split_of(members: list[int]) -> None:
    c10d._get_default_group().split_group(members, group_name="bad")


def test_split_that_failed_is_tried_again_with_a_late_member(ranks):
    world = ranks.world(3)
    for call in [world.start(rank, split, [0, 1, 2], 0.7) for rank in (0, 2)]:
        call.error("CommTimeoutError")
    calls = world.start_all(retry_split, [0, 1, 2])
    assert [call.value() for call in calls] == [(rank, 3, 3) for rank in range(3)]


def retry_split(members: list[int]) -> tuple[int, int, int] | None:
    """A member that gave up is told once, and the others of it."""
    import torchft_ext

    for _ in range(4):
        try:
            return split(members)
        except torchft_ext.CommError:
            continue
    return split(members)


def start_waiting_split(ranks: Pool, world: World) -> Call:
    """A split of rank 0 and rank 1, of which rank 0 has come and waits for the other."""
    address = ranks.address()
    together(world, address)
    call = world.start(0, split, [0, 1])
    ranks.await_key(address, "split/3/0")  # both members, as bits; the record of rank 0
    return call


def test_abort_ends_a_split_that_waits(ranks):
    world = ranks.world(2)
    call = start_waiting_split(ranks, world)
    world.side(0, abort)
    call.error("CommAbortedError", patience=20)


def test_split_that_waits_ends_when_its_group_begins_another_generation(ranks):
    world = ranks.world(2)
    call = start_waiting_split(ranks, world)
    address = ranks.address()
    values_of([world.start_side(rank, configure_next, address, rank, 2) for rank in range(2)])
    assert "began another generation" in call.error("CommAbortedError", patience=20).text
    assert world.run(split, [0, 1]) == [(0, 2, 1), (1, 2, 1)]


# ---------------------------------------------------------------- shrink_group


def shrink(excluded: list[int], flags: int = 0) -> tuple[int, int, int]:
    """Rank and size in what is the default group then, and its sum of 1 + rank."""
    c10d.shrink_group(excluded, shrink_flags=flags)
    tensor = torch.tensor([1 + dist.get_rank()])
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), int(tensor.item())


def blocking_sum() -> None:
    dist.all_reduce(torch.ones(1))


def test_survivors_shrink_the_group_by_who_died_once_and_again(ranks):
    world = ranks.fresh(4)
    blocked = [world.start(rank, blocking_sum) for rank in (0, 2, 3)]
    world.kill(1)
    for call in blocked:
        assert call.error("PeerLostError").cause["rank"] == 1
    calls = [world.start(rank, shrink, [1]) for rank in (0, 2, 3)]
    assert [call.value() for call in calls] == [(0, 3, 6), (1, 3, 6), (2, 3, 6)]
    calls = [world.start(rank, split, [0, 2]) for rank in (0, 2, 3)]
    assert [call.value() for call in calls] == [(0, 2, 2), None, (1, 2, 2)]
    world.kill(3)
    for call in [world.start(rank, blocking_sum) for rank in (0, 2)]:
        assert call.error("PeerLostError").cause["rank"] == 2
    calls = [world.start(rank, shrink, [2]) for rank in (0, 2)]
    assert [call.value() for call in calls] == [(0, 2, 3), (1, 2, 3)]


def test_shrink_leaves_out_the_living_too(ranks):
    world = ranks.fresh(3)
    calls = [world.start(rank, shrink, [0]) for rank in (1, 2)]
    assert [call.value() for call in calls] == [(0, 2, 3), (1, 2, 3)]


def test_shrink_abort_ends_operations_under_way(ranks):
    world = ranks.fresh(3)
    blocked = world.start_blocked(0, blocking_sum)
    calls = [world.start(1, shrink, [2], c10d.SHRINK_ABORT)]
    assert "SHRINK_ABORT" in blocked.error("CommAbortedError").text
    calls.insert(0, world.start(0, shrink, [2], c10d.SHRINK_ABORT))
    assert [call.value() for call in calls] == [(0, 2, 3), (1, 2, 3)]
    assert world.on(2, wait_errored).type == "CommAbortedError"


def shrink_backend(excluded: list[int], flags: int) -> None:
    backend().shrink(excluded, flags)


@pytest.mark.parametrize(
    ("excluded", "flags", "expected"),
    [
        ([], 0, "expected at least one rank, found none"),
        ([2], 0, "expected ranks from 0 to 1, found 2"),
        ([1, 1], 0, "expected each rank once, found 1 twice"),
        ([0, 1], 0, "expected some of the 2 ranks to be left, found all of them"),
        ([0], 0, "expected ranks of others, found this one, 0"),
        ([1], 7, "expected SHRINK_DEFAULT (0) or SHRINK_ABORT (1), found 7"),
    ],
)
def test_shrink_refuses_what_makes_no_group(ranks, excluded, flags, expected):
    world = ranks.world(2)
    assert expected in world.start(0, shrink_backend, excluded, flags).error("ValueError").text


def configure_nowhere() -> None:
    backend().configure("127.0.0.1:1/nowhere", 0, 1, timeout=seconds(0.2))


def test_group_without_a_generation_cannot_be_shrunk(ranks):
    world = ranks.world(2)
    world.start(0, configure_nowhere).error("StoreLostError", "CommTimeoutError")
    text = world.start(0, shrink_backend, [1], 0).error("RuntimeError").text
    assert "expected a group with a generation, found none: configure() it first" in text


def split_after_shutdown(address: str) -> None:
    group = torchft_ext.make_group(connected_store(address), 0, 1, name="shut")
    torchft_ext.backend(group).shutdown()
    group.split_group([0])


def test_group_that_was_shut_down_cannot_be_split(ranks):
    error = ranks.world(1).start(0, split_after_shutdown, ranks.address()).error("RuntimeError")
    assert "found one that was shut down: make a new group" in error.text
