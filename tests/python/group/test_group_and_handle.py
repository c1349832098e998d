"""A group's configure() and that of its handle both serve 'ft' and 'ft:gloo' alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE, World, values_of
from rankside import connected_store, leave_default_group, seconds, wait_until

import torchft_ext
from torchft_ext import process_group as pgs

NAMES = ["ft", "ft:host", "ft:gloo"]


def go_on_in_every_way(name: str, address: str, rank: int) -> list[object]:
    """Sums of the generations that each way has begun, in turn; the second after an abort."""
    leave_default_group()
    store, limit = connected_store(address), seconds(PATIENCE)
    dist.init_process_group(name, store=store, rank=rank, world_size=2, timeout=limit)
    world, handle = dist.group.WORLD, torchft_ext.backend()
    ways = [
        lambda place: world.configure(place, rank, 2),
        lambda place: handle.configure(place, rank, 2, timeout=limit),
        lambda place: world.configure(place, "replica", rank=rank, world_size=2),
        lambda place: torchft_ext.backend(world).configure(place, rank, world_size=2),
    ]
    found: list[object] = []
    for number, configure in enumerate(ways):
        tensor = torch.ones(1)
        configure(f"{address}/{number}")
        dist.all_reduce(tensor)
        found.append((tensor.item(), handle.rank(), handle.size(), handle.generation))
        assert world.errored() is None and handle.errored() is None
        handle.check()
        dist.barrier()
        if rank == 1:
            store.set(f"past/{number}", "1")
        else:
            store.wait([f"past/{number}"], limit)
            (world if number == 0 else handle).abort()
        wait_until(lambda: handle.errored() is not None, "errored()")
        assert type(world.errored()) is type(handle.errored())
        assert handle.get_error() == torch._C._distributed_c10d.ErrorType.COMM_ERROR
    handle.shutdown()
    leave_default_group()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_group_and_handle_begin_generations_alike(ranks, name):
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    calls = [world.start(rank, go_on_in_every_way, name, address, rank) for rank in range(2)]
    for rank, found in enumerate(values_of(calls)):
        assert found == [(2.0, rank, 2, number) for number in range(2, 6)]


def test_abort_by_the_handle_says_why(store):
    group = pgs.ProcessGroupGloo(timeout=PATIENCE)
    group.configure(f"127.0.0.1:{store.port}/why", 0, 1)
    torchft_ext.backend(group).abort("the manager says so")
    assert "the manager says so" in str(group.errored())
    group.shutdown()


class Overriding(pgs.ProcessGroupGloo):
    """A subclass that does something of its own around both calls."""

    def configure(self, store_addr: str, *args: object, **kwargs: object) -> None:
        self.calls = ["configure"]
        super().configure(store_addr, *args, **kwargs)

    def abort(self, errored: bool = True) -> None:
        self.calls.append("abort")
        super().abort(errored)


@pytest.mark.parametrize("wrapped", [False, True])
def test_handle_calls_what_a_subclass_overrides(store, wrapped):
    group = Overriding(timeout=PATIENCE)
    outer = pgs.ProcessGroupWrapper(group) if wrapped else group
    handle = torchft_ext.backend(outer)
    handle.configure(f"127.0.0.1:{store.port}/own", 0, 1, timeout=seconds(PATIENCE))
    handle.abort("the manager says so")
    assert group.calls == ["configure", "abort"]
    assert "the manager says so" in str(outer.errored())
    with pytest.raises(torchft_ext.CommError, match=r"0\.2\d* s into the configure"):
        handle.configure(f"127.0.0.1:{store.port}/two", 0, 2, timeout=seconds(0.25))
    group.shutdown()


@pytest.mark.parametrize("method", ["stats", "shrink", "register_mem_pool", "no_such_name"])
def test_handle_names_what_it_lacks(method):
    with pytest.raises(AttributeError, match=method):
        getattr(torchft_ext.backend(pgs.ProcessGroupGloo()), method)


def test_groups_of_others_have_no_configure():
    leave_default_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in ("configure", "errored"):
        assert not hasattr(dist.group.WORLD, name)
        assert not hasattr(dist.ProcessGroup, name)
    leave_default_group()


def registered_group_of_two(address: str, rank: int) -> list[int]:
    """The ranks that torch's tables have after the handle has made the group larger."""
    group = pgs.ProcessGroupHost(timeout=PATIENCE).register("grows")
    group.configure(f"{address}/alone{rank}", 0, 1)
    torchft_ext.backend(group).configure(f"{address}/both", rank, 2)
    found = dist.get_process_group_ranks(group)
    group.unregister()
    group.shutdown()
    return found


def test_tables_of_a_registered_group_follow_its_handle(ranks):
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    calls = [world.start(rank, registered_group_of_two, address, rank) for rank in range(2)]
    assert values_of(calls) == [[0, 1]] * 2
