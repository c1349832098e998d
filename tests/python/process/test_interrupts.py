"""Ctrl-C where torch itself waits, and whose the wakeup descriptor is."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from fresh_process import run_cases
from rankside import (
    PATIENCE,
    errored,
    init_fresh,
    kept,
    main_thread_waits_in_c,
    wait_errored,
    wait_until,
)
from test_failures import blocking_future
from test_features import one_backward, wrap_in_ddp
from values import check_sum

LONGER_THAN_THE_WATCH_WAITS = 1.0  # seconds; what must not happen has no event to wait for


def blocking_functional() -> None:
    funcol.wait_tensor(funcol.all_reduce(torch.ones(1000), "sum", dist.group.WORLD))


def interrupted_in(wait: str) -> None:
    """The wait may end with the generation's error; the signal has its turn right after it."""
    import torchft_ext

    try:
        WAITS[wait]()
    except torchft_ext.CommAbortedError:
        while True:
            pass


def blocking_send() -> None:
    dist.send(torch.ones(8_000_000), 1)


WAITS = {
    "backward": one_backward,
    "send": blocking_send,
    "future": blocking_future,
    "functional": blocking_functional,
}


@pytest.mark.parametrize("wait", WAITS)
def test_interrupt_leaves_torchs_wait_for_a_frozen_peer(ranks, wait):
    world = ranks.world(3)
    world.run(wrap_in_ddp)
    world.freeze(1)
    blocked = world.start_blocked(0, interrupted_in, wait)
    world.side(0, main_thread_waits_in_c)
    world.interrupt(0)
    blocked.error("KeyboardInterrupt", patience=10)
    error = world.on(2, wait_errored)
    assert error.type == "CommAbortedError" and error.cause["rank"] == 0
    world.next([0, 2]).run(check_sum)


def make_a_group(address: str) -> None:
    """The default group, or where there is no address, one of its members."""
    if address:
        init_fresh(address, 0, 2)
    else:
        dist.new_group([0, 1], backend="ft")


def main_thread_makes_a_group() -> None:
    """Return once it is in the call that meets the other members, or about to make it."""
    main = threading.main_thread().ident
    assert main is not None
    wait_until(lambda: sys._current_frames()[main].f_code.co_name == "create", "the making")


@pytest.mark.parametrize("made", ["init_process_group", "new_group"])
def test_interrupt_leaves_the_making_of_a_group_whose_member_does_not_come(ranks, made):
    world = ranks.fresh(2)
    address = ranks.address() if made == "init_process_group" else ""
    waiting = world.start(0, make_a_group, address)
    world.side(0, main_thread_makes_a_group)
    world.interrupt(0)
    waiting.error("KeyboardInterrupt", patience=10)
    for rank in range(2):  # their numbers of groups differ now
        world.kill(rank)


def wait_under_handler_of_its_own() -> list[int]:
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        blocking_future()
    finally:
        signal.signal(signal.SIGINT, previous)
    return seen


def test_handler_of_the_users_that_does_not_raise_keeps_the_operation(ranks):
    world = ranks.world(2)
    blocked = world.start_blocked(0, wait_under_handler_of_its_own)
    world.side(0, main_thread_waits_in_c)
    world.interrupt(0)
    time.sleep(LONGER_THAN_THE_WATCH_WAITS)
    world.on(1, blocking_future)
    assert blocked.value() == [signal.SIGINT]
    assert world.side(0, errored) is None


def run_python_meanwhile() -> None:
    kept["work"] = dist.all_reduce(torch.ones(1000), async_op=True)
    try:
        kept["in_python"] = True
        while True:
            pass
    except KeyboardInterrupt:
        kept["interrupted"] = True
    limit = time.monotonic() + LONGER_THAN_THE_WATCH_WAITS
    while time.monotonic() < limit:
        pass  # still Python: the question may come late on a busy machine


def in_python() -> None:
    wait_until(lambda: kept.pop("in_python", False), "the main thread's loop")


def finish_work() -> None:
    kept.pop("work").wait()
    assert kept.pop("interrupted")


def test_interrupt_of_a_rank_that_runs_python_keeps_the_generation(ranks):
    world = ranks.world(2)
    running = world.start(0, run_python_meanwhile)
    world.side(0, in_python)
    world.interrupt(0)
    running.value()
    assert world.side(0, errored) is None
    peer = world.start(1, blocking_future)
    world.on(0, finish_work)
    peer.value()


def init_alone() -> None:
    dist.init_process_group("ft", store=dist.HashStore(), rank=0, world_size=1)


def descriptor_in_use() -> int:
    current = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(current, warn_on_full_buffer=False)
    return current


def places_of_interrupts(call: Callable[[], object]) -> int:
    """At how many places of _interrupts.py a handler of a signal could raise in the call, and
    did; the descriptor in use is the same after each."""
    from torchft_ext import _interrupts

    before = descriptor_in_use()
    for number in itertools.count():
        places = itertools.count()

        def look(frame: FrameType, event: str, _: object, number=number, places=places) -> None:
            ours = frame.f_globals["__name__"] == _interrupts.__name__
            if ours and event in ("call", "c_return") and next(places) == number:
                raise KeyboardInterrupt

        sys.setprofile(look)
        try:
            call()
        except KeyboardInterrupt:
            assert descriptor_in_use() == before, number
        else:
            return number
        finally:
            sys.setprofile(None)
    raise AssertionError


def threads() -> list[str]:
    import torchft_ext

    return torchft_ext.backend().stats()["threads"]


def child_of_fork_gets(number: int) -> int:
    """Exit code of a child that is sent a signal while it sleeps."""
    child = os.fork()
    if child == 0:
        signal.signal(number, lambda *_: os._exit(7 if descriptor_in_use() == -1 else 8))
        while True:
            os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def descriptor_case(case: str) -> object:
    if case == "free":
        init_alone()
        assert descriptor_in_use() != -1 and "ft-signals" in threads()
        dist.destroy_process_group()
        before = descriptor_in_use()
        init_alone()
        assert descriptor_in_use() == before and threads().count("ft-signals") == 1
    elif case == "taken":
        ours, _theirs = socket.socketpair()
        ours.setblocking(False)
        signal.set_wakeup_fd(ours.fileno())
        init_alone()
        assert descriptor_in_use() == ours.fileno() and "ft-signals" not in threads()
        from torchft_ext import _interrupts

        assert places_of_interrupts(_interrupts.watch) > 2
        assert places_of_interrupts(_interrupts.release) > 2
    elif case == "other_thread":
        thread = threading.Thread(target=init_alone)
        thread.start()
        thread.join(PATIENCE)
        assert descriptor_in_use() == -1 and "ft-signals" not in threads()
    elif case == "forked":
        init_alone()
        assert child_of_fork_gets(signal.SIGINT) == 7
        assert descriptor_in_use() != -1
    check_sum()
    return case


def test_wakeup_descriptor_is_taken_only_where_it_is_free(rank_env):
    cases = ["free", "taken", "other_thread", "forked"]
    run_cases("test_interrupts", "descriptor_case", cases, rank_env)


def disabled_case(_: str) -> int:
    init_alone()
    return descriptor_in_use()


def test_disabled_library_leaves_the_wakeup_descriptor_alone(rank_env):
    env = {**rank_env, "TORCHFT_EXT_DISABLE": "1"}
    assert run_cases("test_interrupts", "disabled_case", ["off"], env) == {"off": -1}


EXITING = """
import atexit, signal
import torch.distributed as dist
atexit.register(lambda: print("at exit", signal.set_wakeup_fd(-1)))
dist.init_process_group("ft", store=dist.HashStore(), rank=0, world_size=1)
"""


def test_wakeup_descriptor_is_given_back_at_exit(rank_env):
    command = [sys.executable, "-c", EXITING]
    done = subprocess.run(command, env=rank_env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "at exit -1" in done.stdout, (done.stdout, done.stderr)


def fork_and_interrupt() -> None:
    assert child_of_fork_gets(signal.SIGINT) == 7


def test_interrupt_of_a_forked_child_keeps_the_parents_wait(ranks):
    world = ranks.world(2)
    blocked = world.start_blocked(0, blocking_future)
    world.side(0, main_thread_waits_in_c)
    world.side(0, fork_and_interrupt)
    time.sleep(LONGER_THAN_THE_WATCH_WAITS)
    assert world.side(0, errored) is None
    world.on(1, blocking_future)
    blocked.value()
