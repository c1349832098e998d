"""Signals and exits: the library is a good citizen of its process."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Died, Worker
from rankside import (
    OPERATION_LIMIT,
    PATIENCE,
    backend,
    failure_of,
    leave_default_group,
    main_thread_waits_in_c,
    seconds,
    wait_errored,
    wait_until,
)
from tasks import thread_names
from test_failures import blocking_all_reduce, blocking_barrier, blocking_recv
from timing import AT_ONCE, assert_within
from values import check_sum

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.mark.parametrize("operation", [blocking_all_reduce, blocking_recv, blocking_barrier])
def test_interrupt_leaves_a_wait_and_aborts_the_generation(ranks, operation):
    world = ranks.world(3)
    blocked = world.start_blocked(0, operation)
    peer = world.start_blocked(1, operation)
    world.side(0, main_thread_waits_in_c)
    world.interrupt(0)
    blocked.error("KeyboardInterrupt", patience=10)
    assert peer.error("CommAbortedError", patience=10).cause["rank"] == 0
    assert world.on(2, wait_errored).type == "CommAbortedError"
    world.next().run(check_sum)


def configure_noted(address: str) -> None:
    import rankside

    rankside.kept["configuring"] = True
    backend().configure(address, 0, 2)


def wait_configuring() -> None:
    import rankside

    wait_until(lambda: bool(rankside.kept.pop("configuring", None)), "the start of configure()")


def test_interrupt_leaves_configure(ranks):
    world = ranks.world(2)
    blocked = world.start(0, configure_noted, ranks.address())
    world.side(0, wait_configuring)
    world.interrupt(0)
    blocked.error("KeyboardInterrupt", patience=10)
    world.next().run(check_sum)


def signal_masks() -> dict[str, int]:
    masks = {}
    for task, name in thread_names().items():
        if not name.startswith("ft-"):
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines)
            masks[f"{name} {task}"] = int(status["SigBlk"], 16)
    return masks


def test_threads_of_the_library_block_signals(ranks):
    world = ranks.world(2)
    world.run(check_sum)
    masks = world.on(0, signal_masks)
    assert masks
    for name, mask in masks.items():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
            assert mask >> (number - 1) & 1, (name, number)


EXIT_LIMIT = 1.5  # seconds; the hook gives itself 1


def time_the_exit_hook() -> None:
    """What the library does at exit writes to the log how long it took."""
    import torchft_ext

    def timed() -> None:
        began = time.monotonic()
        torchft_ext._install.at_exit()
        print(f"exit hook: {time.monotonic() - began:.3f} s", flush=True)

    atexit.unregister(torchft_ext._install.at_exit)
    atexit.register(timed)


def time_of_the_exit_hook(worker: Worker) -> float:
    log = worker.log()
    found = re.findall(r"exit hook: ([\d.]+) s", log)
    assert len(found) == 1 and "terminate" not in log, log
    return float(found[0])


def end_of_script(worker: Worker) -> float:
    ended = time.monotonic()
    assert worker.exit() == 0
    return ended


def end_with(error: BaseException) -> float:
    import rankside

    rankside.kept["ending"] = error
    return time.monotonic()


def sys_exit(worker: Worker) -> float:
    ended = worker.call(end_with, (SystemExit(3),), {}).value()
    assert worker.process.wait(PATIENCE) == 3
    return ended


def unhandled_exception(worker: Worker) -> float:
    ended = worker.call(end_with, (RuntimeError("nobody catches this"),), {}).value()
    assert worker.process.wait(PATIENCE) == 1
    return ended


def times_of_an_end(ranks, victim: int, operation, end) -> list[float]:
    """Of the victim's exit hook, and from right before its end until each other is released."""
    world = ranks.world(3)
    others = [rank for rank in range(3) if rank != victim]
    world.on(victim, time_the_exit_hook)
    blocked = [world.start_blocked(rank, operation) for rank in others]
    ended = end(world.workers[victim])
    errors = [call.error("PeerLeftError", patience=10) for call in blocked]
    assert [error.cause["rank"] for error in errors] == [victim, victim]
    world.next(others).run(check_sum)
    hook = time_of_the_exit_hook(world.workers[victim])
    return [hook, *(error.at - ended for error in errors)]


@pytest.mark.parametrize(
    ("victim", "operation", "end"),
    [
        (1, blocking_all_reduce, end_of_script),
        (0, blocking_all_reduce, sys_exit),
        (2, blocking_barrier, sys_exit),
        (0, blocking_barrier, unhandled_exception),
        (2, blocking_all_reduce, unhandled_exception),
    ],
)
def test_rank_whose_interpreter_ends_is_told_as_left_at_once(ranks, victim, operation, end):
    assert_within(AT_ONCE, lambda: times_of_an_end(ranks, victim, operation, end))


def seen_by_ranks_of_multiprocessing(folder, env, method: str, *how: str) -> dict[str, list]:
    """What ranks 0 and 1 have seen when rank 2 has returned: see mp_ranks."""
    command = [sys.executable, str(SUPPORT / "mp_ranks.py"), method, str(folder / "store"), *how]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("order", ["imported_early", "imported_by_the_child"])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_child_of_multiprocessing_that_returns_harms_nobody(tmp_path, rank_env, method, order):
    how = ["early"] if order == "imported_early" else []
    seen = seen_by_ranks_of_multiprocessing(tmp_path, rank_env, method, *how)
    assert seen == {"0": [None, "PeerLeftError"], "1": [None, "PeerLeftError"]}


@pytest.mark.parametrize("order", ["imported_early", "imported_by_the_child"])
def test_child_that_chose_another_start_method_for_its_own_children_harms_nobody(
    tmp_path, rank_env, order
):
    how = ["early"] if order == "imported_early" else []
    seen = seen_by_ranks_of_multiprocessing(tmp_path, rank_env, "fork", "other", *how)
    assert seen == {"0": [None, "PeerLeftError"], "1": [None, "PeerLeftError"]}


ABSENT = """
import time
from datetime import timedelta

import torch.distributed as dist
from tasks import thread_names
from torchft_ext import _C

def listed():
    return "ft-store" in thread_names().values()

server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
_C._publish_failed_init(server, 1, 2, "a test says so")
limit = time.monotonic() + 30
while not listed() and time.monotonic() < limit:  # a new thread is listed before it has its name
    time.sleep(0.01)
assert listed()
ended = _C._process_exit(timedelta(seconds=60))
limit = time.monotonic() + 30
while listed() and time.monotonic() < limit:  # a thread that was joined is listed a moment longer
    time.sleep(0.01)
print(ended, listed())
"""


def test_process_that_made_no_group_ends_the_thread_that_told_so(rank_env):
    done = subprocess.run(
        [sys.executable, "-c", ABSENT],
        env=rank_env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout == "True False\n", done.stdout + done.stderr


def leave_operation_behind() -> None:
    import rankside

    rankside.kept["work"] = dist.irecv(torch.ones(10), 0)


@pytest.mark.parametrize("end", [end_of_script, sys_exit])
def test_rank_with_an_operation_under_way_can_exit(ranks, end):
    def times() -> list[float]:
        world = ranks.world(2)
        world.on(1, time_the_exit_hook)
        world.on(1, leave_operation_behind)
        end(world.workers[1])
        assert world.on(0, wait_errored).type in ("PeerLeftError", "CommAbortedError")
        return [time_of_the_exit_hook(world.workers[1])]

    assert_within(EXIT_LIMIT, times)


def make_groups_beside() -> None:
    import rankside

    members = list(range(dist.get_world_size()))
    rankside.kept["beside"] = [dist.new_group(members) for _ in range(16)]


def errors_beside() -> set[str]:
    import rankside

    types = set()
    for group in rankside.kept.pop("beside"):
        failure = failure_of(lambda group=group: dist.all_reduce(torch.ones(10), group=group))
        types.add(failure.type if failure else "none")
    return types


def test_exit_with_a_receive_under_way_says_goodbye_in_the_groups_beside(ranks):
    told = []
    for _ in range(3):  # a machine that stalls for the time of the exit hook costs a goodbye
        world = ranks.fresh(2)
        world.run(make_groups_beside)
        world.on(1, leave_operation_behind)
        assert world.workers[1].exit() == 0
        told.append(world.on(0, errors_beside))
        if told[-1] == {"PeerLeftError"}:
            return
    raise AssertionError(told)


def own_sockets() -> set[str]:
    """Of this process; the monitor's lines are in tables of its own."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(entry))
    return {target for target in found if target.startswith("socket:")}


def await_closed(sockets: set[str]) -> None:
    wait_until(lambda: not sockets & own_sockets(), "the end of the connections")


def send_and_shut_down() -> None:
    dist.broadcast(torch.full((1000,), 4.0), 0)
    backend().shutdown()


def receive_what_was_sent() -> None:
    tensor = torch.zeros(1000)
    dist.broadcast(tensor, 0)
    assert bool((tensor == 4.0).all())


@pytest.mark.parametrize("local", [True, False], ids=["local", "tcp"])
@pytest.mark.parametrize("process", ["stays", "ends"])
def test_operation_whose_bytes_were_sent_before_leaving_completes(ranks, process, local):
    own = {"local_sockets": local, "heartbeat": seconds(33)}  # a group of its own
    world = ranks.world(2, **own)
    before = world.on(0, own_sockets)
    world = world.next(**own)
    connections = world.on(0, own_sockets) - before
    assert connections
    world.on(0, send_and_shut_down)
    if process == "ends":
        assert world.workers[0].exit() == 0
    else:
        world.on(0, await_closed, connections)
    world.on(1, receive_what_was_sent)


def broadcast_more_than_was_sent() -> str:
    receive_what_was_sent()
    failure = failure_of(lambda: dist.broadcast(torch.zeros(1000), 0))
    assert failure is not None
    return failure.type


@pytest.mark.parametrize("local", [True, False], ids=["local", "tcp"])
def test_operation_after_the_last_of_a_leaver_fails_at_once(ranks, local):
    world = ranks.world(2, local_sockets=local, heartbeat=seconds(34))
    world.on(0, send_and_shut_down)
    assert world.workers[0].exit() == 0
    begun = time.monotonic()
    assert world.on(1, broadcast_more_than_was_sent) == "PeerLeftError"
    assert time.monotonic() - begun < OPERATION_LIMIT / 2


def vanish() -> None:
    os._exit(0)


def test_exit_without_goodbye_is_a_death(ranks):
    world = ranks.world(3)
    blocked = [world.start_blocked(rank, blocking_all_reduce) for rank in (1, 2)]
    gone = world.start(0, vanish)
    for call in blocked:
        assert call.error("PeerLostError", patience=10).cause["rank"] == 0
    with pytest.raises(Died):
        gone.outcome()
    world.next([1, 2]).run(check_sum)


def destroy_and_wait() -> str:
    dist.destroy_process_group()
    return "destroyed"


def test_destroy_process_group_says_goodbye(ranks):
    world = ranks.fresh(2)
    blocked = world.start_blocked(0, blocking_all_reduce)
    assert world.on(1, destroy_and_wait) == "destroyed"
    assert blocked.error("PeerLeftError", patience=10).cause["rank"] == 1


def store_after_destroy() -> bool:
    """Whether a server that this process hosted for its group answers when the group is gone."""
    leave_default_group()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    store = dist.PrefixStore("alone", server)
    dist.init_process_group("ft", store=store, rank=0, world_size=1)
    dist.destroy_process_group()
    del server, store
    gc.collect()
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return False
    return True


def test_store_handed_in_is_let_go_with_the_group(ranks):
    assert ranks.world(1).on(0, store_after_destroy) is False


def file_after_destroy(path: str) -> None:
    """torch removes a FileStore's file with the last of those who use it."""
    leave_default_group()
    store = dist.FileStore(path, 1)
    dist.init_process_group("ft", store=store, rank=0, world_size=1)
    assert os.path.exists(path)
    dist.destroy_process_group()
    del store
    gc.collect()
    wait_until(lambda: not os.path.exists(path), "the removal of the store's file")


def test_file_of_a_store_is_removed_with_the_group(ranks, tmp_path):
    ranks.world(1).on(0, file_after_destroy, str(tmp_path / "store"))


def exec_something_else() -> None:
    os.execv("/bin/true", ["true"])


def test_exec_of_another_program_is_a_death(ranks):
    world = ranks.world(2)
    blocked = world.start_blocked(0, blocking_all_reduce)
    world.start(1, exec_something_else)
    assert blocked.error("PeerLostError", patience=10).cause["rank"] == 1


def two_groups() -> None:
    from rankside import kept

    import torchft_ext

    kept["second"] = dist.new_group(backend="ft")
    assert torchft_ext.backend(kept["second"]).size() == dist.get_world_size()


def second_group_error() -> str:
    from rankside import kept

    import torchft_ext

    second = torchft_ext.backend(kept["second"])
    wait_until(lambda: second.errored() is not None, "the second group's failure")
    return type(second.errored()).__name__


def test_death_is_told_to_every_group_of_the_process(ranks):
    world = ranks.fresh(3)
    world.run(two_groups)
    world.kill(2)
    for rank in (0, 1):
        assert world.on(rank, wait_errored).type == "PeerLostError"
        assert world.on(rank, second_group_error) == "PeerLostError"
