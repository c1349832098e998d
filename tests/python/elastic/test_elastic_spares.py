"""Processes that wait for a place in an elastic job when all of its members end."""

from __future__ import annotations

import time

import pytest
from elastic_side import come, jobs, members
from ranks import World, values_of
from rankside import PATIENCE, failure_of, seconds, wait_until

world = members(4)


@pytest.mark.parametrize("rule", ["members", "store"])
def test_spares_that_alone_remain_are_told_who_has_ended(ranks, world, rule):
    address = ranks.address()
    founders = World(ranks, world.workers[:2])
    spares = World(ranks, world.workers[2:])
    founders.run(come_to_a_full_job, address, rule)
    founders.run(take_part)
    spares.run(come_to_a_full_job, address, rule)
    waiting = spares.start_all(end_of_waiting)
    founders.side(0, wait_for_spares, 2)
    pids = founders.run(own_name)
    for rank in (0, 1):
        founders.kill(rank)
    for kind, text, elapsed in values_of(waiting):
        assert kind == "NoQuorumError" and elapsed < PATIENCE / 2
        assert all(f"{name} (its process ended)" in text for name in pids), text


def come_to_a_full_job(address: str, rule: str) -> None:
    come(address, 2, max_size=2, rule=rule)


def take_part() -> None:
    jobs[0].recover()


def own_name() -> str:
    return jobs[0].name_of(jobs[0].id)


def wait_for_spares(count: int) -> None:
    wait_until(lambda: len(jobs[0].waiting()) == count, "spares")


def end_of_waiting() -> tuple[str, str, float]:
    """What a spare is told, and after how long."""
    began = time.monotonic()
    end = failure_of(lambda: jobs[0].recover(seconds(PATIENCE)))
    assert end is not None
    return end.type, end.text, time.monotonic() - began
