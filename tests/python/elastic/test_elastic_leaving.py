"""torchft_ext.elastic: a process that is told to leave ends its waits, and one that was left out
comes back.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from elastic_side import close, come, jobs, leave_once_in, members
from ranks import World, values_of
from rankside import PATIENCE, ErrorInfo, failure_of, leave_default_group, seconds, wait_until
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import torchft_ext
from torchft_ext import elastic
from torchft_ext.elastic import _job

world = members(3)

sizes: list[int] = []  # of the views in which this member trained
attempts: list[str] = []  # the member's id in each


def error_of_join(address: str) -> tuple[str, float]:
    return error_and_time(lambda: come(address, 2))


def error_of_recover() -> tuple[str, float]:
    return error_and_time(lambda: jobs[0].recover())


def error_and_time(wait) -> tuple[str, float]:
    began = time.monotonic()
    error = failure_of(wait)
    assert isinstance(error, ErrorInfo)
    return f"{error.type}: {error.text}", time.monotonic() - began


def assert_left_soon(told: tuple[str, float]) -> None:
    assert told[0].startswith("LeftOutError: ") and "told to leave" in told[0]
    assert told[1] < PATIENCE / 4


def test_join_that_waits_for_founders_ends(ranks, world):
    address = ranks.address()
    waiting = world.start(0, error_of_join, address)
    ranks.await_key(address, "seat/0")
    world.side(0, leave_once_in, "join")
    assert_left_soon(waiting.value())
    founders = World(ranks, world.workers[1:])
    founders.run(come, address, 2)  # its seat is free
    assert founders.run(recover_size) == [2, 2]


def recover_size() -> int:
    return jobs[0].recover().size


def test_founder_that_waits_for_the_first_view_ends_and_others_go_on(ranks, world):
    founders = World(ranks, world.workers[:2])
    founders.run(come, ranks.address(), 2)
    waiting = founders.start(0, error_of_recover)
    founders.side(0, leave_once_in, "recover")
    assert_left_soon(waiting.value())
    founders.on(0, close)
    assert founders.on(1, recover_size) == 1


def test_close_releases_members_that_wait_for_this_one(ranks, world):
    world.run(come, ranks.address(), 3)
    assert world.run(recover_size) == [3] * 3
    blocked = [world.start(rank, size_after_failed_sum) for rank in (0, 1)]
    assert world.on(2, close_time) < PATIENCE / 4
    assert values_of(blocked) == [("it left", 2)] * 2


def size_after_failed_sum() -> tuple[str, int]:
    try:
        dist.all_reduce(torch.ones(1))
    except torchft_ext.CommError as error:
        assert error.cause is not None
        return error.cause.how[:7], jobs[0].recover().size
    raise AssertionError("nobody has left")


def close_time() -> float:
    """Where it had to wait for the others, it would do so for long."""
    began, before = time.monotonic(), _job._LEAVE_WITHIN
    _job._LEAVE_WITHIN = timedelta(seconds=PATIENCE)
    try:
        close()
    finally:
        _job._LEAVE_WITHIN = before
    return time.monotonic() - began


def test_member_that_was_left_out_joins_again_until_the_job_is_over(ranks, world):
    pair = World(ranks, world.workers[:2])
    runs = pair.start_all(run_to_end, ranks.address())
    for rank in (0, 1):
        pair.side(rank, wait_for_size, 2)
    pair.freeze(1)
    pair.side(0, wait_for_size, 1)
    pair.thaw(1)
    (first, first_end), (second, second_end) = values_of(runs)
    assert [first_end, second_end] == [elastic.Exit.OVER] * 2
    assert first >= 1 and second >= 2


def wait_for_size(size: int) -> None:
    wait_until(lambda: sizes[-1:] == [size], f"a view of {size}")


def run_to_end(address: str) -> tuple[int, int]:
    leave_default_group()
    sizes.clear()
    attempts.clear()
    limits = {"limit": seconds(1.0), "timeout": seconds(PATIENCE)}
    end = elastic.run(train_until_it_is_back, address, size=2, min_size=1, **limits)
    assert not dist.is_initialized()
    return len(attempts), end


def train_until_it_is_back(job: elastic.Job) -> None:
    attempts.append(job.id)
    model = DDP(nn.Linear(2, 1))
    state = elastic.State(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in elastic.steps(state, total=10**9):
        with step:
            model(torch.ones(1, 2)).sum().backward()
            if 1 in sizes and step.view.size == 2:
                step.stop()
            step.commit()
        if sizes[-1:] != [step.view.size]:
            sizes.append(step.view.size)


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_run_ends_with_train_and_leaves_the_job(ranks, world, end):
    address = ranks.address()
    kind, text = world.on(0, run_that, address, end)
    assert kind == ("ElasticError" if end == "returns" else "ZeroDivisionError")
    assert end == "raises" or "train() returned, and the job is not known to be over" in text
    world.on(0, come, ranks.address(), 1)  # nothing of the job is left


def run_that(address: str, end: str) -> tuple[str, str]:
    leave_default_group()
    train = {"returns": lambda _: None, "raises": lambda _: 1 / 0}[end]
    error = failure_of(lambda: elastic.run(train, address, size=1))
    assert error is not None
    return error.type, error.text


def test_listed_member_that_lingers_tells_who_comes_that_the_job_is_over(ranks, world, free_port):
    listed = [f"127.0.0.1:{free_port}"]
    first = world.start(0, run_one_step, listed, free_port)
    world.side(0, wait_for_size, 1)
    late, took = world.on(1, run_one_step_and_time, listed)
    assert late == (0, elastic.Exit.OVER) and took < PATIENCE / 4
    world.side(0, leave_once_in, "_wait")
    assert first.value() == (1, elastic.Exit.OVER)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_one_step(listed: list[str], listen: int | None) -> tuple[int, int]:
    leave_default_group()
    sizes.clear()
    attempts.clear()
    options = {"members": listed, "listen": listen, "key": "the job's key", "size": 1}
    linger = seconds(PATIENCE)
    end = elastic.run(train_one_step, linger=linger, timeout=seconds(PATIENCE), **options)
    return len(attempts), end


def run_one_step_and_time(listed: list[str]) -> tuple[tuple[int, int], float]:
    began = time.monotonic()
    return run_one_step(listed, None), time.monotonic() - began


def train_one_step(job: elastic.Job) -> None:
    attempts.append(job.id)
    model = nn.Linear(2, 1)
    state = elastic.State(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in elastic.steps(state, total=1):
        with step:
            model(torch.ones(1, 2)).sum().backward()
            step.commit()
    sizes.append(1)


@pytest.mark.parametrize("options", [{}, {"members": ["a:1"], "linger": -seconds(1.0)}])
def test_linger_is_a_time_of_a_job_with_members(options):
    with pytest.raises(ValueError, match="linger: expected none, or a time and a job with members"):
        elastic.run(lambda _: None, "a:1/b", **{"size": 1, "linger": seconds(1.0), **options})
