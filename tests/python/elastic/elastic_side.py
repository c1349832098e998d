"""What runs inside the ranks of tests of elastic jobs, and the workers that come to them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from ranks import Pool, World
from rankside import PATIENCE, leave_default_group, seconds, wait_until
from torch import nn

from torchft_ext import elastic

jobs: list[elastic.Job] = []


def members(count: int) -> Callable:
    """A fixture: workers that may come to a job, and leave it after the test."""

    @pytest.fixture
    def world(ranks: Pool) -> Iterator[World]:
        made = World(ranks, ranks.borrow(count))
        yield made
        made.run_at_the_end(close)

    return world


def come(address: str | None, size: int, **options: object) -> str:
    """Join; return this member's id."""
    leave_default_group()
    limits = {"limit": seconds(1.0), "timeout": seconds(PATIENCE)}
    jobs[:] = [elastic.join(address, size=size, **{"min_size": 1, **limits, **options})]
    return jobs[0].id


def close() -> None:
    for job in jobs:
        job.close()
    jobs.clear()
    leave_default_group()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def gradient(model: nn.Module, number: int) -> None:
    """The same on all who train, so that the result does not depend on how many do."""
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    model(inputs).square().mean().backward()


def recover() -> int:
    return jobs[0].recover().rank


def wait_for_newcomer() -> None:
    wait_until(lambda: bool(jobs[0].waiting()), "a newcomer")


def is_waiting_in(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def leave_once_in(function: str) -> None:
    """As a handler does, but on another thread: as soon as the main thread waits in it."""
    main = threading.main_thread().ident
    assert main is not None

    def is_there() -> bool:
        frame = sys._current_frames()[main]
        while frame is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        return frame is not None

    wait_until(is_there, function)
    elastic.leave()


def wait_for_threads(name: str) -> None:
    wait_until(lambda: is_waiting_in(name), f"thread {name}")
