"""torch's own way to begin a generation: members that are named by handles."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ranks import World, values_of
from rankside import (
    OPERATION_LIMIT,
    PATIENCE,
    connected_store,
    errored,
    leave_default_group,
    seconds,
    wait_errored,
)
from torch.distributed import distributed_c10d as c10d
from values import check_sum

pytestmark = pytest.mark.skipif(
    not hasattr(c10d, "_reconfigure"), reason="torch before 2.14 has no reconfigure()"
)


def init_unconnected(address: str, rank: int, size: int) -> str:
    """Make the default group without a generation; its handle."""
    leave_default_group()
    dist.init_process_group(
        "ft",
        store=connected_store(address),
        rank=rank,
        world_size=size,
        timeout=seconds(OPERATION_LIMIT),
        enable_reconfigure=True,
    )
    assert c10d._supports_reconfigure()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    return c10d._get_reconfigure_handle()


def reconfigure(
    uuid: int, handles: list[str] | set[str], limit: float = PATIENCE
) -> tuple[int, int]:
    assert c10d._reconfigure(uuid, handles, timeout=seconds(limit)).wait()
    assert dist.get_process_group_ranks(None) == list(range(dist.get_world_size()))
    check_sum()
    return dist.get_rank(), dist.get_world_size()


def unconnected(ranks, size: int) -> tuple[World, list[str]]:
    world, address = World(ranks, ranks.borrow(size)), ranks.address()
    calls = [world.start(rank, init_unconnected, address, rank, size) for rank in range(size)]
    return world, values_of(calls)


def test_ranks_are_the_positions_in_the_list_of_handles(ranks):
    world, handles = unconnected(ranks, 3)
    backwards = handles[::-1]
    assert world.run(reconfigure, 1, backwards) == [(2, 3), (1, 3), (0, 3)]


def test_a_set_of_handles_gives_each_rank_once(ranks):
    world, handles = unconnected(ranks, 3)
    assert sorted(world.run(reconfigure, 1, set(handles))) == [(0, 3), (1, 3), (2, 3)]


def test_survivors_go_on_without_the_dead_and_take_in_a_newcomer(ranks):
    world, address = World(ranks, ranks.borrow(4)), ranks.address()
    calls = [world.start(rank, init_unconnected, address, rank, 4) for rank in range(4)]
    handles = values_of(calls)
    founders = World(ranks, world.workers[:3])
    founders.run(reconfigure, 1, handles[:3])
    world.kill(1)
    for rank in (0, 2):
        assert world.on(rank, wait_errored).type == "PeerLostError"
    members = World(ranks, [world.workers[rank] for rank in (0, 2, 3)])
    expected = [(0, 3), (1, 3), (2, 3)]
    assert members.run(reconfigure, 2, [handles[0], *handles[2:]]) == expected


def refused(uuid: int, handles: list[str], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as caught:
        c10d._reconfigure(uuid, handles)
    check_sum()
    return str(caught.value)


def test_used_uuid_is_refused_and_the_generation_goes_on(ranks):
    world, handles = unconnected(ranks, 2)
    world.run(reconfigure, 7, handles)
    texts = world.run(refused, 7, handles[::-1], RuntimeError)
    assert all("already used" in text for text in texts)
    assert world.run(errored) == [None, None]
    world.run(reconfigure, 8, handles)


def test_handles_that_are_no_membership_are_refused(ranks):
    world, handles = unconnected(ranks, 2)
    world.run(reconfigure, 1, handles)
    for bad in ([], [*handles, handles[0]], ["ft:of:somebody:else"], [*handles, "gloo:0:1:2"]):
        assert all("handles" in text for text in world.run(refused, 2, bad))


def test_failed_attempt_may_be_repeated_with_its_uuid(ranks):
    world, handles = unconnected(ranks, 2)
    early = world.start(0, reconfigure, 3, handles, 1.0)
    assert early.error("CommTimeoutError").fields["op"] == "configure"
    assert world.run(reconfigure, 3, handles) == [(0, 2), (1, 2)]


def test_halves_of_a_world_may_use_one_uuid(ranks):
    world, handles = unconnected(ranks, 4)
    halves = [handles[:2], handles[2:]]
    calls = [world.start(rank, reconfigure, 1, halves[rank // 2]) for rank in range(4)]
    assert values_of(calls) == [(0, 2), (1, 2), (0, 2), (1, 2)]


def init_with_a_store_of_its_own() -> str:
    leave_default_group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = seconds(OPERATION_LIMIT)
    dist.init_process_group(
        "ft", store=store, rank=0, world_size=1, timeout=limit, enable_reconfigure=True
    )
    return c10d._get_reconfigure_handle()


@pytest.mark.parametrize("kind", [list, set])
def test_members_without_a_common_store_meet(ranks, kind):
    world = World(ranks, ranks.borrow(3))
    handles = world.run(init_with_a_store_of_its_own)
    assert sorted(world.run(reconfigure, 1, kind(handles))) == [(0, 3), (1, 3), (2, 3)]


def test_a_store_without_an_address_has_no_handle():
    leave_default_group()
    dist.init_process_group(
        "ft", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True
    )
    try:
        with pytest.raises(ValueError, match="expected a group over a TCPStore"):
            c10d._get_reconfigure_handle()
    finally:
        leave_default_group()
