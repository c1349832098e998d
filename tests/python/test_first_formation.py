"""A group forms over the store that its creator was given, without a connection more."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch.distributed as dist
from namespaces import in_namespaces
from ranks import Pool, World, values_of
from rankside import connected_store, leave_default_group, seconds
from values import check_sum

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
