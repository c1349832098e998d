"""The library blocks without the GIL: other Python threads run while the main thread is in it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import baby_nccl_side
import device_side
import pytest
import torch
import torch.distributed as dist
from device_side import accelerator
from ranks import World
from rankside import PATIENCE, abort, backend, init_fresh, kept, wait_errored, wait_until
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


# ---- a group whose engine runs in a child process


@pytest.fixture
def parent(devices, tmp_path) -> Iterator[World]:
    """A world of one, whose child and device are simulated."""
    violations, pool = str(tmp_path / "violations"), devices.pool
    world = World(pool, pool.borrow(1))
    world.on(0, baby_nccl_side.begin_alone, violations, pool.address(), "")
    world.on(0, forget_the_last_call)
    yield world
    world.on(0, baby_nccl_side.leave, violations)


of_the_simulator = pytest.mark.skipif(
    not accelerator.nccl_simulated(), reason="the child is the simulator's"
)


def sum_past(driver_call: str) -> float:
    """A sum whose issue sits in that call until driver_goes_on()."""
    tensor = torch.ones(4, device=device_side.device())
    accelerator.simulator().inject(f"block {driver_call}")
    works: list[dist.Work] = []
    _in_sight(lambda: works.append(kept["group"].allreduce([tensor])))
    works[0].wait()
    return tensor[0].item()


def driver_goes_on() -> None:
    accelerator.simulator().inject("clear")


@of_the_simulator
@pytest.mark.parametrize("driver_call", ["lend", "lend_event", "record"])
def test_python_runs_while_a_driver_describes_what_a_child_is_lent(parent, driver_call):
    issuing = parent.start(0, sum_past, driver_call)
    assert_python_runs_beside(parent, 0)
    parent.side(0, driver_goes_on)
    assert issuing.value() == 1.0


def wait_for_a_stopped_child() -> float:
    tensor, pid = torch.ones(4, device=device_side.device()), kept["group"].child_pid()
    os.kill(pid, signal.SIGSTOP)
    _in_sight(kept["group"].allreduce([tensor]).wait)
    return tensor[0].item()


def await_end_of_child() -> bool:
    child = kept["group"]._children.last()
    gone: list[bool] = []
    _in_sight(lambda: gone.append(child.await_gone(PATIENCE)))
    return gone[0]


def signal_child(number: int) -> None:
    os.kill(kept["group"].child_pid(), number)


@of_the_simulator
@pytest.mark.parametrize(
    ("call", "ended_by", "result"),
    [
        (wait_for_a_stopped_child, signal.SIGCONT, 1.0),
        (await_end_of_child, signal.SIGKILL, True),
    ],
)
def test_python_runs_while_a_child_is_waited_for(parent, call, ended_by, result):
    waiting = parent.start(0, call)
    assert_python_runs_beside(parent, 0)
    parent.side(0, signal_child, ended_by)
    assert waiting.value() == result
