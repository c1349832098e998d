"""Times over a century mean never, wherever they are given."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from ranks import values_of
from rankside import backend, connected_store, errored, leave_default_group
from values import check_sum

# Nanoseconds in 64 bits hold the first no more, microseconds not the second.
OVERLONG = (datetime.timedelta(days=293 * 365), datetime.timedelta.max)
A_CENTURY = datetime.timedelta(days=100 * 365)


def recv_within(limit: datetime.timedelta) -> None:
    dist.irecv(torch.ones(3), 1).wait(limit)


def send_one() -> None:
    dist.send(torch.ones(3), 0)


@pytest.mark.parametrize("limit", OVERLONG)
def test_overlong_timeout_of_wait_means_never(ranks, limit):
    world = ranks.world(2)
    waiting = world.start_blocked(0, recv_within, limit)
    assert world.side(0, errored) is None
    world.on(1, send_one)
    waiting.value()
    world.run(check_sum)


def live_without_limits(addresses: list[str], rank: int, size: int, limit: object) -> None:
    backend().configure(addresses[0], rank, size, timeout=limit)
    backend().set_timeout(limit)
    check_sum()
    backend().check(limit)
    backend().configure(addresses[1], rank, size)
    check_sum()


@pytest.mark.parametrize("limit", OVERLONG)
def test_overlong_timeouts_of_a_group_mean_never(ranks, limit):
    world, addresses = ranks.world(2), [ranks.address(), ranks.address()]
    calls = [world.start(rank, live_without_limits, addresses, rank, 2, limit) for rank in range(2)]
    values_of(calls)
    world.next().run(check_sum)


def make_groups_without_limits(address: str, limit: datetime.timedelta) -> None:
    import torchft_ext

    leave_default_group()
    dist.init_process_group(
        "ft", store=connected_store(address), rank=0, world_size=1, timeout=limit
    )
    check_sum()
    assert backend().options._timeout > A_CENTURY
    options = torchft_ext.Options(timeout=limit)
    assert options.timeout > A_CENTURY
    dist.barrier(dist.new_group(backend="ft", pg_options=options))


@pytest.mark.parametrize("limit", OVERLONG)
def test_groups_are_made_with_overlong_timeouts(ranks, limit):
    ranks.world(1).on(0, make_groups_without_limits, ranks.address(), limit)
