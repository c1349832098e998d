"""What runs inside the ranks of tests of elastic jobs whose members make groups in each view."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from ranks import Pool, World
from rankside import PATIENCE, leave_default_group, seconds, wait_until

from torchft_ext import elastic

jobs: list[elastic.Job] = []


def five_members(ranks: Pool) -> Iterator[World]:
    """Of a fixture: workers that may come to a job, and leave it after the test."""
    made = World(ranks, ranks.borrow(5))
    yield made
    made.run_at_the_end(close)


def come(address: str, size: int) -> None:
    leave_default_group()
    limits = {"limit": seconds(1.0), "timeout": seconds(PATIENCE)}
    jobs[:] = [elastic.join(address, size=size, min_size=1, **limits)]


def close() -> None:
    for job in jobs:
        job.close()
    jobs.clear()
    leave_default_group()


def recover() -> int:
    return jobs[0].recover().rank


def wait_for_newcomer() -> None:
    wait_until(lambda: bool(jobs[0].waiting()), "a newcomer")


def is_waiting_in(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def wait_for_threads(name: str) -> None:
    wait_until(lambda: is_waiting_in(name), f"thread {name}")
