"""TORCHFT_EXT_NCCL_REINIT=shrink: after a failure the next epoch's communicator is made out of the
last one's, where members only went."""

from __future__ import annotations

import os

import torch.distributed as dist
from device_side import accelerator, check_sum, leave, no_violation
from rankside import abort, backend, failure_of, wait_errored
from test_device_training import lose_one_of_three_while_training, train, wrap_in_ddp

VARIABLE = "TORCHFT_EXT_NCCL_REINIT"
CAN_REVOKE = 22807  # NCCL's version


def take_road(road: str | None) -> None:
    """Groups made from now on take it; the next world's default group is one of them."""
    os.environ.pop(VARIABLE, None)
    if road is not None:
        os.environ[VARIABLE] = road
    leave()


def inherited() -> int:
    return backend().stats()["counters"]["nccl_inherited"]


def inherits(before: int, count: int) -> None:
    """So many communicators of this process were made out of others since then."""
    if backend().stats()["counters"]["nccl_version"] < CAN_REVOKE:
        count = 0
    assert inherited() - before == count
    if accelerator.nccl_simulated() and count > 0:
        assert accelerator.simulator().report()["counts"].get("inits", 0) == 0
    no_violation()


def test_ddp_on_devices_trains_on_through_a_kill_and_an_abort_by_shrinking(devices):
    world = devices.world(3)
    world.run(take_road, "shrink")
    world = devices.next(world, range(3))
    before = world.run(inherited)
    world.run(wrap_in_ddp)
    world.run(train, 2)
    world = devices.next(lose_one_of_three_while_training(world), [0, 2])
    world.run(train, 2, first=2)
    world.side(0, inherits, before[0], 1)
    world.side(1, inherits, before[2], 1)
    world.side(0, abort)
    world.run(wait_errored)
    world = devices.next(world, [0, 1])
    world.run(train, 1, first=4)
    world.side(0, inherits, before[0], 2)
    world.run(take_road, None)


def test_a_road_that_there_is_not_is_refused(devices):
    world = devices.world(1)
    error = world.side(0, refused_road)
    assert error is not None and error.type == "ValueError", error
    assert f"{VARIABLE}: expected 'plain' or 'shrink', found 'grow'" in error.text


def refused_road():
    os.environ[VARIABLE] = "grow"
    try:
        return failure_of(lambda: dist.new_group([0]))
    finally:
        del os.environ[VARIABLE]


def test_by_default_communicators_are_made_anew(devices):
    world = devices.world(2)
    before = world.run(inherited)
    world.run(check_sum)
    world.side(0, abort)
    world.run(wait_errored)
    world = devices.next(world, range(2))
    world.run(check_sum)
    assert world.run(inherited) == before
