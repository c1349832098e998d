"""A thousand epochs, of which some fail, leak no thread, descriptor, memory or key."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
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

WARM_UP = 500  # epochs after which the allocator's arenas have their size


def own_resources() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    threads = len(os.listdir("/proc/self/task"))
    # Those in single threads' private tables too, which /proc/self/fd does not show.
    descriptors = backend().stats()["descriptors"]
    assert descriptors >= len(os.listdir("/proc/self/fd")) - 1
    return {"threads": threads, "descriptors": descriptors, "rss": resident}


def epochs_alone(address: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        backend().configure(f"{address}/{number}", 0, 1)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        if number % 10 == 0:
            backend().abort("a failed epoch among them")
            assert errored().type == "CommAbortedError"


def assert_no_growth(before: dict[str, int], after: dict[str, int]) -> None:
    assert after["threads"] <= before["threads"], (before, after)
    assert after["descriptors"] <= before["descriptors"], (before, after)
    assert after["rss"] - before["rss"] < 4 << 20, (before, after)


def settled_resources(before: dict[str, int] | None = None) -> dict[str, int]:
    """Resources now; what is released in the background gets time to go."""

    def settled() -> bool:
        now = own_resources()
        return all(now[name] <= before[name] for name in ("threads", "descriptors"))

    if before is not None:
        limit = time.monotonic() + 15
        while not settled() and time.monotonic() < limit:
            time.sleep(0.05)
    return own_resources()


def test_a_thousand_epochs_alone_leak_nothing(ranks):
    world, address = ranks.world(1), ranks.address()
    world.on(0, epochs_alone, address, 0, WARM_UP)
    before, keys = world.on(0, settled_resources), ranks.store_keys()
    world.on(0, epochs_alone, address, WARM_UP, 1000)
    assert_no_growth(before, world.on(0, settled_resources, before))
    wait_until(lambda: ranks.store_keys() <= keys, "the deletion of the epochs' keys")
    stats = world.on(0, all_stats)
    assert stats["epochs"] >= WARM_UP + 1000 and stats["stuck_threads"] == 0
    world.next().run(check_sum)


def epochs_together(address: str, rank: int, first: int, count: int) -> None:
    for number in range(first, first + count):
        configure(f"{address}/{number}", rank, 2)
        if number % 10 != 0:
            check_sum()
        elif rank == 0:
            check_sum()
            backend().abort("a failed epoch among them")
        else:  # an abort ends what the others have not completed yet: this sum, now and then
            failure = failure_of(check_sum)
            assert failure is None or failure.type == "CommAbortedError", failure
            assert wait_errored().type == "CommAbortedError"
        if number % 25 == 0:
            error = failure_of(lambda n=number: configure(f"{address}/{n}/no", 0, 2, 0.02))
            assert error is None or "CommError" in error.kinds


@pytest.mark.parametrize("local_sockets", (True, False))
def test_a_thousand_epochs_of_two_leak_nothing(ranks, local_sockets):
    world, address = ranks.world(2, local_sockets=local_sockets), ranks.address()

    def go(first: int, count: int) -> None:
        calls = [
            world.start(rank, epochs_together, address, rank, first, count) for rank in range(2)
        ]
        values_of(calls, patience=400)

    go(0, WARM_UP)
    before, keys = world.run(settled_resources), ranks.store_keys()
    go(WARM_UP, 1000)
    for rank in range(2):
        assert_no_growth(before[rank], world.on(rank, settled_resources, before[rank]))
    wait_until(lambda: ranks.store_keys() <= keys, "the deletion of the epochs' keys")
    world.next().run(check_sum)
