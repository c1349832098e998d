"""The child processes of one group: when each starts and ends, and that none leaves anything."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from baby_side import await_gone, await_spare
from process_group_side import (
    LIMIT,
    held,
    place,
)
from rankside import seconds, wait_until
from timing import AT_ONCE, assert_within
from torch._C._distributed_c10d import AllgatherOptions

from torchft_ext import (
    CommAbortedError,
    CommError,
    CommTimeoutError,
    RendezvousError,
    _pg_baby,
    _pg_child,
)
from torchft_ext import process_group as pgs


def test_configure_takes_the_spare_and_has_another_started(store, baby):
    first, spare = baby.child_pid(), await_spare(baby)
    baby.configure(place(store), 0, 1)
    assert baby.child_pid() == spare
    assert await_spare(baby) not in (first, spare)
    await_gone(first)


def test_spare_that_died_is_replaced(store, baby):
    spare = await_spare(baby)
    os.kill(spare, signal.SIGKILL)
    await_gone(spare)
    baby.configure(place(store), 0, 1)
    baby.allreduce([torch.ones(1)]).wait()
    assert await_spare(baby) != spare


def test_end_of_the_process_waits_for_threads_that_are_only_being_started():
    ran = threading.Event()
    thread = threading.Thread(target=ran.set, name="ft-slow", daemon=True)
    threading._limbo[thread] = thread  # as Thread.start() has it before there is a thread
    threading.Timer(0.05, thread.start).start()
    _pg_child._join("ft-slow", time.monotonic() + LIMIT)
    assert ran.is_set()


def test_end_by_a_signal_without_a_name_is_told(store, baby):
    child = baby.child_pid()
    os.kill(child, 40)
    wait_until(lambda: baby.errored() is not None, "the end of the child")
    assert f"its child process {child} was ended by signal 40" in str(baby.errored())
    await_gone(child)


def shared_files() -> int:
    """Arenas that this process has mapped, or open."""
    maps = Path("/proc/self/maps").read_text()
    return maps.count("torchft_ext-arena")


def children() -> int:
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_generations_leave_no_processes_descriptors_threads_or_memory(store, baby):
    def generations(count: int) -> None:
        for _ in range(count):
            baby.configure(place(store), 0, 1)
            baby.allreduce([torch.ones(1)]).wait()
        wait_until(lambda: baby.retired() == 0, "the end of old children")
        await_spare(baby)

    def all_held() -> dict[str, int]:
        gc.collect()
        return {**held(), "arenas": shared_files(), "children": children()}

    generations(3)
    before = all_held()
    before["task"] += 2  # helpers, which stay: as many as were needed at one time
    generations(20)

    def grown() -> dict[str, int]:
        return {name: count for name, count in all_held().items() if count > before[name]}

    try:
        wait_until(lambda: not grown(), f"as much as before: {before}")
    except AssertionError as error:
        raise AssertionError(f"{error}; there are now {grown()}") from None


def test_killed_generations_leave_nothing_either(store, baby):
    def generations(count: int) -> None:
        for _ in range(count):
            pid = baby.child_pid()
            os.kill(pid, signal.SIGSTOP)
            work = baby.allreduce([torch.ones(1000)])
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(CommAbortedError, match="was ended by SIGKILL"):
                work.wait()
            baby.configure(place(store), 0, 1)
        wait_until(lambda: baby.retired() == 0, "the end of old children")
        await_spare(baby)

    generations(2)
    before = {**held(), "arenas": shared_files(), "children": children()}
    before["task"] += 2  # helpers, which stay: as many as were needed at one time
    generations(10)

    def as_before() -> bool:
        gc.collect()
        now = {**held(), "arenas": shared_files(), "children": children()}
        return all(count <= before[name] for name, count in now.items())

    wait_until(as_before, f"as much as before: {before}")


def test_shutdown_does_not_wait_for_a_child_that_is_stopped(store):
    def times() -> list[float]:
        group = pgs.ProcessGroupBabyHost(timeout=LIMIT)
        group.configure(place(store), 0, 1)
        spare, child = await_spare(group), group.child_pid()
        os.kill(child, signal.SIGSTOP)
        began = time.monotonic()
        group.shutdown()
        took = time.monotonic() - began
        await_gone(child, spare)
        return [took]

    assert_within(AT_ONCE, times)


def test_group_that_is_dropped_takes_its_children_along(store):
    group = pgs.ProcessGroupBabyHost(timeout=LIMIT)
    group.configure(place(store), 0, 1)
    pids = [await_spare(group), group.child_pid()]
    del group
    gc.collect()
    await_gone(*pids)


def test_group_may_be_configured_again_after_shutdown(store, baby):
    baby.shutdown()
    with pytest.raises(CommError, match="shutdown\\(\\) was called"):
        baby.allreduce([torch.ones(1)]).wait()
    baby.configure(place(store), 0, 1)
    baby.allreduce([torch.ones(1)]).wait()


def test_death_is_told_at_once_where_nothing_is_under_way(baby):
    os.kill(baby.child_pid(), signal.SIGKILL)
    wait_until(lambda: baby.errored() is not None, "errored()")
    with pytest.raises(CommAbortedError, match="its child process"):
        baby.allreduce([torch.ones(1)]).wait()


def test_callback_that_blocks_holds_up_no_other_operation(store, baby):
    begun, may_end = threading.Event(), threading.Event()

    def block(_future):
        begun.set()
        assert may_end.wait(LIMIT)

    baby.allreduce([torch.ones(1)]).get_future().add_done_callback(block)
    assert begun.wait(LIMIT)
    baby.allreduce([torch.ones(1)]).wait(seconds(LIMIT / 2))
    may_end.set()


def test_limit_of_an_operation_ends_the_generation(baby):
    os.kill(baby.child_pid(), signal.SIGSTOP)
    work = baby.allreduce([torch.ones(1)])
    with pytest.raises(CommTimeoutError, match=r"allreduce #1 on .*not complete after"):
        work.wait(seconds(0.05))
    assert isinstance(baby.errored(), CommTimeoutError)


def test_bad_arguments_are_told_and_leave_the_generation(baby):
    with pytest.raises(ValueError, match="own input and output to be of one size"):
        options = dist.ReduceScatterOptions()
        baby._reduce_scatter_base(torch.empty(2), torch.empty(3), options).wait()
    with pytest.raises(ValueError, match="expected tensors, found none"):
        baby.allreduce([])
    with pytest.raises(ValueError, match="expected tensors on the CPU, found one on meta"):
        baby.allreduce([torch.ones(1, device="meta")])
    with pytest.raises(ValueError, match="expected dense tensors"):
        baby.allreduce([torch.ones(1).to_sparse()])
    with pytest.raises(ValueError, match=r"can add, found torch\.complex64"):
        baby.allreduce([torch.ones(1, dtype=torch.complex64)])
    with pytest.raises(ValueError, match="expected integers or bool for BAND, found F32"):
        baby.allreduce([torch.ones(1)], dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match="root: found 5"):
        baby.broadcast_one(torch.ones(1), 5).wait()
    with pytest.raises(ValueError, match="expected 1 outputs and 1 inputs, found 2 and 1"):
        baby.allgather([[torch.ones(1)] * 2], [torch.ones(1)], AllgatherOptions()).wait()
    assert baby.errored() is None
    tensor = torch.ones(1)
    assert baby.allreduce([tensor]).get_future().wait()[0] is tensor


def test_base_class_and_a_child_that_cannot_start_say_so(monkeypatch, store):
    with pytest.raises(NotImplementedError, match="make ProcessGroupBabyHost"):
        pgs.ProcessGroupBaby()
    monkeypatch.setattr(_pg_baby, "_HOST_CHILD", Path("/no/such/program"))
    with pytest.raises(OSError):
        pgs.ProcessGroupBabyHost()
    monkeypatch.setattr(_pg_baby, "_HOST_CHILD", Path("/bin/false"))
    group = pgs.ProcessGroupBabyHost(timeout=LIMIT)
    with pytest.raises(RendezvousError, match=r"its child process \d+ exited with status 1"):
        group.configure(place(store), 0, 1)
    group.shutdown()


def test_native_child_is_small(baby):
    baby.allreduce([torch.ones(1)]).wait()
    status = Path(f"/proc/{baby.child_pid()}/status").read_text()
    (resident,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    assert int(resident) < 20 * 1024
