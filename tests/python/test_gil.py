"""The library blocks without the GIL: other Python threads run while the main thread is in it."""

from __future__ import annotations

import time
from collections.abc import Callable

import device_side
import pytest
import torch
import torch.distributed as dist
from ranks import World
from rankside import abort, backend, init_fresh, wait_errored, wait_until
from stopped_threads import stopped_threads
from values import check, check_sum

TICKS = 20
ANSWER = 20.0  # seconds for what takes a fraction of one, unless the GIL is held

# Whether the main thread is in the call; not in rankside.kept, which goes with the group.
_inside: dict[str, bool] = {}


def _in_sight(call: Callable[[], object]) -> None:
    _inside["call"] = True
    try:
        call()
    finally:
        _inside["call"] = False


def still_inside_after_ticks() -> bool:
    """Whether the main thread is in the call when this one has run Python for a while beside it.

    A call that holds the GIL is over before the second tick.
    """
    wait_until(lambda: _inside.get("call", False), "the call")
    for _ in range(TICKS):
        time.sleep(0.005)
    return _inside["call"]


def assert_python_runs_beside(world: World, rank: int) -> None:
    asked = world.start_side(rank, still_inside_after_ticks)
    assert asked.value(patience=ANSWER), "the call was over before other threads had their turn"


def forget_the_last_call() -> None:
    _inside.clear()


def init_in_sight(address: str) -> None:
    _in_sight(lambda: init_fresh(address, 0, 2))


def test_python_runs_while_init_process_group_waits_for_a_member(ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world, address = World(ranks, ranks.borrow(2)), f"127.0.0.1:{store.port}/own"
    world.on(0, forget_the_last_call)
    keys = store.num_keys()
    first = world.start(0, init_in_sight, address)
    wait_until(lambda: store.num_keys() > keys, "the record of the first")
    assert_python_runs_beside(world, 0)
    world.on(1, init_fresh, address, 1, 2)
    first.value()
    world.run(check_sum)


def abort_in_sight() -> None:
    _in_sight(abort)


def test_python_runs_while_abort_waits_for_the_engine(ranks):
    world = ranks.world(2)
    world.on(0, forget_the_last_call)
    try:
        with stopped_threads(world.workers[0].pid, "ft-loop"):
            aborting = world.start(0, abort_in_sight)
            assert_python_runs_beside(world, 0)
    except PermissionError as error:
        pytest.skip(str(error))
    aborting.value()
    assert world.on(1, wait_errored).type == "CommAbortedError"
    world.next().run(check_sum)


LEAVE: dict[str, Callable[[], object]] = {
    "shutdown": lambda: backend().shutdown(),
    "destroy_process_group": dist.destroy_process_group,
}


def leave_in_sight(how: str) -> None:
    """Which waits for the message."""
    received = torch.zeros(10)
    work = dist.irecv(received, 1)
    _in_sight(LEAVE[how])
    work.wait()
    check(received, torch.ones(10), "what was received while leaving")


def send_to_the_leaver() -> None:
    dist.send(torch.ones(10), 0)


@pytest.mark.parametrize("how", LEAVE)
def test_python_runs_while_a_rank_that_leaves_waits_for_a_message(ranks, how):
    world = ranks.fresh(2)
    world.on(0, forget_the_last_call)
    leaving = world.start(0, leave_in_sight, how)
    assert_python_runs_beside(world, 0)
    world.on(1, send_to_the_leaver)
    leaving.value()


def check_in_sight() -> None:
    device_side.hold()
    tensor = device_side.ones(10)
    dist.all_reduce(tensor)
    _in_sight(lambda: backend().check())
    check(tensor.cpu(), torch.ones(10), "the sum of one rank")


def test_python_runs_while_check_waits_for_a_stream(devices):
    world = devices.world(1)
    world.on(0, forget_the_last_call)
    checking = world.start(0, check_in_sight)
    assert_python_runs_beside(world, 0)
    world.side(0, device_side.let_go)
    checking.value()
