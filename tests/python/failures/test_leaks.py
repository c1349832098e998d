"""A thousand generations, of which some fail, leak no thread, descriptor, memory, key, or entry in
torch's own registries."""

from __future__ import annotations

import gc
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from heap import heap_bytes, private_bytes
from ranks import values_of
from rankside import (
    all_stats,
    backend,
    configure,
    errored,
    failure_of,
    wait_errored,
    wait_until,
)
from values import check_sum

WARM_UP = 500  # generations after which the bounded histories are full
ROUND = 1000  # generations
ROUNDS = 3  # a leak grows in each of them; what has a size to find does not
MOST_BYTES = 256 << 10  # of a round
TABLES_OF_TORCH = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "pg_coalesce_state",
)
# of a round, which is half a page a generation: two arenas of Python's allocator
MOST_MAPPED = 2 << 20


def entries_in_torch() -> dict[str, int]:
    """How much torch keeps: works, for compiled code, and what it knows of groups."""
    world = dist.distributed_c10d._world
    tables = {name: getattr(world, name) for name in TABLES_OF_TORCH}
    return {
        "torch's works": torch._C._distributed_c10d._get_work_registry_size(),
        "torch's tags": sum(map(len, world.tags_to_pg.values())),
        **{f"torch's {name}": len(table) for name, table in tables.items()},
    }


def own_resources() -> dict[str, int]:
    gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    # Those in single threads' private tables too, which /proc/self/fd does not show.
    descriptors = backend().stats()["descriptors"]
    assert descriptors >= len(os.listdir("/proc/self/fd")) - 1
    with open("/proc/self/maps") as file:
        shared = sum(line.split()[1].endswith("s") for line in file)
    return {
        "threads": threads,
        "descriptors": descriptors,
        "shared mappings": shared,
        "private bytes": private_bytes(),
        "bytes": heap_bytes(),
        "Python blocks": sys.getallocatedblocks(),
        **entries_in_torch(),
    }


@funcol.allow_inflight_collective_as_graph_input_ctx()  # torch registers each work
def generations_alone(address: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        backend().configure(f"{address}/{number}", 0, 1)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        if number % 10 == 0:
            backend().abort("a failed generation among them")
            assert errored().type == "CommAbortedError"
        if number % 25 == 0:
            error = failure_of(lambda n=number: configure(f"{address}/{n}/no", 0, 2, 0.02))
            assert error.type == "CommTimeoutError", error


ALLOWED = {"private bytes": MOST_MAPPED, "bytes": MOST_BYTES, "Python blocks": ROUND // 2}


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    growth = {name: after[name] - before[name] for name in before}
    return {name: by for name, by in growth.items() if by > ALLOWED.get(name, 0)}


def settled_resources(before: dict[str, int] | None = None) -> dict[str, int]:
    """Resources now; what is kept for a second, or released in the background, gets time to go."""
    limit = time.monotonic() + 15
    now = own_resources()
    while time.monotonic() < limit:
        time.sleep(1.5)
        was, now = now, own_resources()
        if now["bytes"] >= was["bytes"] and not (before and grown(before, now)):
            break
    return now


def assert_no_leak(world, go) -> None:
    """`go(first, count)` runs generations in the ranks of `world`, none of which may grow every
    time."""
    before = world.run(settled_resources)
    rounds = []
    for number in range(ROUNDS):
        go(WARM_UP + number * ROUND, ROUND)
        calls = [world.start(rank, settled_resources, was) for rank, was in enumerate(before)]
        after = values_of(calls)
        rounds.append([grown(was, now) for was, now in zip(before, after, strict=True)])
        if not any(rounds[-1]):
            return
        before = after
    raise AssertionError(f"grown in each of {ROUNDS} rounds of {ROUND} generations: {rounds}")


def test_a_thousand_generations_alone_leak_nothing(ranks):
    world, address = ranks.world(1), ranks.address()

    def go(first: int, count: int) -> None:
        world.on(0, generations_alone, address, first, count)

    go(0, WARM_UP)
    go(0, WARM_UP)
    keys = ranks.store_keys()
    assert_no_leak(world, go)
    wait_until(lambda: ranks.store_keys() <= keys, "the deletion of the generations' keys")
    stats = world.on(0, all_stats)
    assert stats["generations"] >= WARM_UP + ROUND and stats["stuck_threads"] == 0
    world.next().run(check_sum)


@funcol.allow_inflight_collective_as_graph_input_ctx()
def generations_together(address: str, rank: int, first: int, count: int) -> None:
    for number in range(first, first + count):
        configure(f"{address}/{number}", rank, 2)
        if number % 10 != 0:
            check_sum()
        elif rank == 0:
            check_sum()
            backend().abort("a failed generation among them")
        else:  # an abort ends what the others have not completed yet: this sum, now and then
            failure = failure_of(check_sum)
            assert failure is None or failure.type == "CommAbortedError", failure
            assert wait_errored().type == "CommAbortedError"
        if number % 25 == 0:
            error = failure_of(lambda n=number: configure(f"{address}/{n}/no", 0, 2, 0.02))
            assert error is None or "CommError" in error.kinds


@pytest.mark.timeout(900)  # two waits of at most 400 s
@pytest.mark.parametrize("local_sockets", (True, False))
def test_a_thousand_generations_of_two_leak_nothing(ranks, local_sockets):
    world, address = ranks.world(2, local_sockets=local_sockets), ranks.address()

    def go(first: int, count: int) -> None:
        calls = [
            world.start(rank, generations_together, address, rank, first, count)
            for rank in range(2)
        ]
        values_of(calls, patience=400)

    go(0, WARM_UP)
    keys = ranks.store_keys()
    assert_no_leak(world, go)
    wait_until(lambda: ranks.store_keys() <= keys, "the deletion of the generations' keys")
    world.next().run(check_sum)


def groups_and_back(count: int) -> list[dict[str, int]]:
    """What torch keeps after each of some groups was made, used and destroyed."""
    kept = []
    for _ in range(count):
        subgroup = dist.new_group(backend="ft")
        with funcol.allow_inflight_collective_as_graph_input_ctx():
            dist.all_reduce(torch.ones(3), group=subgroup)
        dist.destroy_process_group(subgroup)
        del subgroup
        gc.collect()
        kept.append(entries_in_torch())
    return kept


def test_groups_that_come_and_go_leave_nothing_in_torchs_tables(ranks):
    world = ranks.fresh(2)
    keys = ranks.store_keys()
    for first, *later in world.run(groups_and_back, 5):
        assert all(each == first for each in later), (first, later)
    assert ranks.store_keys() == keys
