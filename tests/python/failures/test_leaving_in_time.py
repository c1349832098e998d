"""shutdown(), destruction and exit end in time, whatever peers and stores do meanwhile."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from rankside import (
    OPERATION_LIMIT,
    PATIENCE,
    ErrorInfo,
    backend,
    configure,
    connected_store,
    describe,
    failure_of,
    kept,
    leave_default_group,
    seconds,
    wait_until,
)
from test_generations import serve_store, together
from test_process import (
    EXIT_LIMIT,
    leave_operation_behind,
    time_of_the_exit_hook,
    time_the_exit_hook,
)
from timing import assert_within

pytestmark = pytest.mark.alone

SHUTDOWN_LIMIT = 5.0  # seconds that shutdown() gives what was issued
BUSY = 5.0  # seconds that a busy machine may take beside


def leave_with_a_receive_under_way(leave: str) -> tuple[float, ErrorInfo | None]:
    work = dist.irecv(torch.ones(10), 1)
    began = time.monotonic()
    if leave == "shutdown":
        backend().shutdown()
    else:
        dist.destroy_process_group()
    took = time.monotonic() - began
    error = failure_of(work.wait)
    leave_default_group()
    return took, error


@pytest.mark.parametrize("leave", ["shutdown", "destroy_process_group"])
def test_leaving_a_frozen_peer_with_an_operation_under_way_ends_in_time(ranks, leave):
    world = ranks.fresh(2)
    world.freeze(1)
    took, error = world.on(0, leave_with_a_receive_under_way, leave)
    assert took < SHUTDOWN_LIMIT + BUSY
    assert error is not None and error.type == "CommAbortedError"


def make_group_of_ones_own(address: str, rank: int, size: int = 2) -> None:
    """One that torch.distributed has no reference to."""
    from torchft_ext import _C

    kept["own"] = _C._create_backend(
        connected_store(address),
        rank,
        size,
        timeout=seconds(OPERATION_LIMIT),
        engine="host",
        name="own",
        options=None,
        may_resize=True,
        begin=True,
    )


def drop_it_with_a_receive_under_way() -> tuple[float, ErrorInfo | None]:
    work = kept["own"].recv([torch.ones(10)], 1, 0)
    began = time.monotonic()
    del kept["own"]
    took = time.monotonic() - began
    return took, failure_of(work.wait)


def error_of_ones_own() -> ErrorInfo:
    wait_until(lambda: kept["own"].errored() is not None, "the failure of the group of one's own")
    return describe(kept.pop("own").errored())


def test_last_reference_to_a_group_goes_at_once_though_an_operation_waits_for_a_frozen_peer(ranks):
    world, address = ranks.world(2), ranks.address()
    for call in [world.start(rank, make_group_of_ones_own, address, rank) for rank in range(2)]:
        call.value()
    world.freeze(1)
    took, error = world.on(0, drop_it_with_a_receive_under_way)
    assert took < OPERATION_LIMIT / 2  # it waited for nothing
    assert error is not None and error.type == "CommAbortedError", error
    world.thaw(1)
    told = world.on(1, error_of_ones_own)  # it was the last one
    assert told.cause["rank"] == 0 and "its group object was destroyed" in told.text, told.text


def sum_and_drop(rank: int) -> float:
    """As a program does that ends right after its last collective."""
    tensor = torch.ones(1)
    kept["own"].allreduce([tensor]).wait()
    if rank == 0:
        del kept["own"]
    return tensor.item()


def exchange(with_rank: int) -> float:
    tensor, given = torch.zeros(1), torch.full((1,), 7.0)
    works = [kept["own"].recv([tensor], with_rank, 0), kept["own"].send([given], with_rank, 0)]
    for work in works:
        work.wait()
    return tensor.item()


def forget() -> None:
    kept.clear()


def receive_from_the_one_that_dropped_it() -> ErrorInfo | None:
    return failure_of(kept["own"].recv([torch.zeros(1)], 0, 0).wait)


def test_others_go_on_after_one_has_dropped_an_idle_group(ranks):
    world, address = ranks.world(3), ranks.address()
    for call in [world.start(rank, make_group_of_ones_own, address, rank, 3) for rank in range(3)]:
        call.value()
    sums = [world.start(rank, sum_and_drop, rank) for rank in range(3)]
    assert [call.value() for call in sums] == [3.0] * 3
    pair = [world.start(rank, exchange, 3 - rank) for rank in (1, 2)]
    assert [call.value() for call in pair] == [7.0, 7.0]
    error = world.on(1, receive_from_the_one_that_dropped_it)
    assert error is not None and error.type == "PeerLeftError" and error.cause["rank"] == 0, error
    world.run(forget)


def test_rank_exits_in_time_though_an_operation_waits_for_a_frozen_peer(ranks):
    def times() -> list[float]:
        world = ranks.world(2)
        world.on(1, time_the_exit_hook)
        world.freeze(0)
        world.on(1, leave_operation_behind)
        assert world.workers[1].exit() == 0
        return [time_of_the_exit_hook(world.workers[1])]

    assert_within(EXIT_LIMIT, times)


def test_rank_exits_in_time_though_its_store_is_frozen_in_a_call(ranks):
    def times() -> list[float]:
        world = ranks.world(2)
        server = ranks.borrow(1, besides=world.workers)[0]
        address = f"127.0.0.1:{server.call(serve_store, (), {}).value()}/generation"
        together(world, address + "1")
        world.on(1, time_the_exit_hook)
        server.freeze()
        call = world.start(1, configure, address + "2", 1, 2, 1.0)
        call.error("CommTimeoutError", patience=PATIENCE)
        assert world.workers[1].exit() == 0
        return [time_of_the_exit_hook(world.workers[1])]

    assert_within(EXIT_LIMIT, times)
