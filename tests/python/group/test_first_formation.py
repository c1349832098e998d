"""A group forms over the store that its creator was given, without a connection more."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

import torch.distributed as dist
from namespaces import in_namespaces
from ranks import Pool, World, values_of
from rankside import configure, connected_store, leave_default_group, seconds
from values import check_sum


def connections_to(port: int) -> int:
    """Of this process, to that port."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            count += (
                one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == port
            )
    return count


def form(address: str, rank: int, size: int) -> tuple[int, int]:
    """The connections to the store: before, and with two groups that have formed."""
    leave_default_group()
    store = connected_store(address)
    port = int(address.split("/")[0].rsplit(":", 1)[1])
    before = connections_to(port)
    dist.init_process_group("ft", store=store, rank=rank, world_size=size, timeout=seconds(40))
    dist.new_group(list(range(size)))
    configure(f"{address}/again", rank, size)
    return before, connections_to(port)


def test_groups_open_no_connection_to_the_store_of_their_creator(ranks: Pool):
    world, address = World(ranks, ranks.borrow(3)), ranks.address()
    for before, after in values_of([world.start(r, form, address, r, 3) for r in range(3)]):
        assert after <= before  # one of an earlier group may have gone meanwhile


LOOK_UP = 1.0  # seconds, of one name, see namespaces.py


def test_forming_a_group_asks_no_name_server_that_never_answers(tmp_path):
    told = in_namespaces("silent_names", tmp_path)
    assert told["while_coming"] > 0, "the store's server looks nobody up any more"
    assert told["while_forming"] == 0, told
    assert max(told["took"].values()) < LOOK_UP * 2, told


def join_while_another_thread_waits_in_the_store(address: str, rank: int, size: int) -> None:
    leave_default_group()
    store = connected_store(address)
    inside = threading.Event()

    def wait_for_ever() -> None:
        inside.set()
        with suppress(dist.DistStoreError):
            store.wait([f"never/{rank}"], seconds(15))

    waiting = threading.Thread(target=wait_for_ever)
    if rank == 1:
        waiting.start()
        inside.wait()
    dist.init_process_group("ft", store=store, rank=rank, world_size=size, timeout=seconds(8))
    connected_store(address).set(f"never/{rank}", "1")
    if rank == 1:
        waiting.join()


def test_creators_store_that_another_thread_waits_in_does_not_hold_the_formation_up(ranks: Pool):
    world = World(ranks, ranks.borrow(3))
    address = ranks.address()
    values_of(
        [
            world.start(rank, join_while_another_thread_waits_in_the_store, address, rank, 3)
            for rank in range(3)
        ]
    )
    world.run(check_sum)
