"""Ctrl-C in configure() of groups over other backends, after the guard has its generation."""

from __future__ import annotations

import sys
import threading

import pytest
import torch.distributed as dist
from process_group_side import LIMIT, leave, whole_sum
from ranks import World, values_of
from rankside import kept, leave_default_group, main_thread_waits_in_c, wait_until

from torchft_ext import process_group as pgs


class Noted(dist.ProcessGroup):
    """A backend that notes how it was ended."""

    def abort(self) -> None:
        kept["ended"] = "aborted"

    def kill(self) -> None:
        kept["ended"] = "killed"


def make(store, rank, size, timeout):
    """Gloo, or before it, while the test holds the gate, what notes its end."""
    gate = kept.get("gate")
    if gate is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    kept["making"] = True
    assert gate.wait(LIMIT)
    return Noted(rank, size)


def new_group(open_gate: bool) -> None:
    leave_default_group()
    kept["gate"] = threading.Event()
    if open_gate:
        kept["gate"].set()
    pgs.declare_backend("gated", pgs.BackendCapabilities(make=make))
    kept["group"] = pgs.ProcessGroupBackend("gated", timeout=LIMIT)


def configure(address: str, rank: int, size: int) -> None:
    kept["group"].configure(address, rank, size)


def make_gloo_from_now_on() -> None:
    kept.pop("gate").set()


def main_thread_is_in(function: str) -> None:
    """Return once it waits there."""
    main = threading.main_thread().ident
    assert main is not None

    def is_there() -> bool:
        frame = sys._current_frames()[main]
        while frame is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        return frame is not None

    wait_until(lambda: kept.get("making", False) and is_there(), function)
    main_thread_waits_in_c()


def how_it_ended() -> str:
    wait_until(lambda: "ended" in kept, "the backend's end")
    wait_until(lambda: kept["group"].retired() == 0, "the retirement's end")
    return kept["ended"]


@pytest.mark.parametrize(
    ("makes", "place", "end"), [(0, "_made", "killed"), (1, "_await_others", "aborted")]
)
def test_interrupt_leaves_configure_while_one_makes_its_backend(ranks, makes, place, end):
    """The rank that is interrupted, 0, or the other one, for which it waits."""
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    for rank in range(2):
        world.on(rank, new_group, rank != makes)
    calls = [world.start(rank, configure, address, rank, 2) for rank in range(2)]
    world.side(0, main_thread_is_in, place)
    world.interrupt(0)
    calls[0].error("KeyboardInterrupt", patience=10)
    told = calls[1].error("CommAbortedError", patience=10)
    assert "interrupted" in told.text and told.cause["rank"] == 0
    world.run(make_gloo_from_now_on)
    assert world.on(0, how_it_ended) == end
    address = ranks.address()
    values_of([world.start(rank, configure, address, rank, 2) for rank in range(2)])
    assert world.run(whole_sum) == [16.0] * 2
    world.run(leave)
