"""Groups over backends of the program's own, in this process alone."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from process_group_side import LIMIT, names
from rankside import seconds, wait_until
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from torchft_ext import CommAbortedError, CommTimeoutError, PeerLeftError, RendezvousError
from torchft_ext import process_group as pgs
from torchft_ext._pg_helpers import Helpers


class Late(dist.ProcessGroup):
    """A backend whose sums end when the test says so."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.given: list[torch.Tensor] = []
        self.futures: list[Future] = []
        self.last: dist.Work | None = None  # the caller's
        self.ended_at_abort: list[bool] = []

    def abort(self) -> None:
        """Note whether the caller's wait had ended before."""
        self.ended_at_abort.append(self.last is not None and self.last.is_completed())

    def allreduce(self, tensors, opts=None):
        self.given += tensors
        self.futures.append(Future())
        return _create_work_from_future(self.futures[-1])


def alone(store, make: Callable, **capabilities: bool) -> pgs.ProcessGroupBackend:
    """A group of one over a backend that was declared just now."""
    name = f"made{next(names)}"
    pgs.declare_backend(name, pgs.BackendCapabilities(make=make, **capabilities))
    group = pgs.ProcessGroupBackend(name, timeout=LIMIT)
    group.configure(f"127.0.0.1:{store.port}/{name}", 0, 1)
    return group


def late(store, **capabilities: bool) -> tuple[pgs.ProcessGroupBackend, Late]:
    made: list[Late] = []

    def make(_store, rank, size, _timeout):
        made.append(Late(rank, size))
        return made[0]

    return alone(store, make, **capabilities), made[0]


def test_abandoned_operation_never_writes_into_the_callers_tensors(store):
    group, backend = late(store)
    first, second = torch.ones(2), torch.ones(2)
    works = [group.allreduce([first]), group.allreduce([second])]
    backend.given[0].fill_(5.0)
    assert first.tolist() == [1.0, 1.0]
    backend.futures[0].set_result([])
    works[0].wait()
    assert first.tolist() == [5.0, 5.0]
    group.abort()
    with pytest.raises(CommAbortedError):
        works[1].wait()
    backend.given[1].fill_(7.0)
    backend.futures[1].set_result([])
    assert second.tolist() == [1.0, 1.0]
    group.shutdown()


def test_backend_that_is_busy_is_counted_until_it_is_gone(store):
    group, backend = late(store)
    group.allreduce([torch.ones(1)])
    group.configure(f"127.0.0.1:{store.port}/next{next(names)}", 0, 1)
    assert group.retired() == 1
    backend.futures[0].set_result([])
    wait_until(lambda: group.retired() == 0, "the backend's end")
    group.shutdown()


def test_inputs_may_change_while_an_abandoned_operation_reads_them(store):
    group, backend = late(store)
    tensor = torch.ones(2)
    group.allreduce([tensor])
    tensor.fill_(3.0)
    assert backend.given[0].tolist() == [1.0, 1.0]
    group.shutdown()


def test_backend_that_is_quiet_after_an_abort_works_on_the_tensors_themselves(store):
    group, backend = late(store, quiet_after_abort=True)
    tensor = torch.ones(2)
    backend.last = group.allreduce([tensor])
    assert backend.given[0].data_ptr() == tensor.data_ptr()
    group.abort()
    assert backend.last.is_completed() and not backend.ended_at_abort[0]
    group.shutdown()


class SlowToAbort(Late):
    """A backend whose first abort() ends when the test says so."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.aborts = 0
        self.may_end = threading.Event()

    def abort(self) -> None:
        self.aborts += 1
        if self.aborts == 1:
            assert self.may_end.wait(LIMIT)


def is_in(function: str, thread_name: str) -> bool:
    """Whether a thread of that name is in a function of that one."""
    frames = sys._current_frames()
    found = [frames.get(one.ident) for one in threading.enumerate() if one.name == thread_name]
    while found:
        frame = found.pop()
        if frame is not None and frame.f_code.co_name == function:
            return True
        found += [frame.f_back] if frame is not None else []
    return False


def test_old_backend_is_aborted_again_only_once_its_first_abort_is_over(store):
    """A member that leaves retires the backend that another thread is aborting."""
    made: list[SlowToAbort] = []

    def make(_store, rank, size, _timeout):
        made.append(SlowToAbort(rank, size))
        return made[0]

    group = alone(store, make, quiet_after_abort=True)
    with ThreadPoolExecutor(1) as thread:
        aborting = thread.submit(group.abort)
        wait_until(lambda: made[0].aborts == 1, "the first abort")
        group._formed.generation._fail_by_leaving(PeerLeftError("a test"))
        wait_until(
            lambda: made[0].aborts > 1 or is_in("await_copies", "ft-retire"), "the retirement"
        )
        seen = made[0].aborts
        made[0].may_end.set()
        aborting.result(LIMIT)
    wait_until(lambda: group.retired() == 0, "the backend's end")
    assert (seen, made[0].aborts) == (1, 2)
    group.shutdown()


def test_future_has_the_outputs_or_raises_the_failure(store):
    group, backend = late(store)
    tensor = torch.ones(1)
    futures = [group.allreduce([tensor]).get_future() for _ in range(2)]
    backend.futures[0].set_result([])
    assert futures[0].wait()[0] is tensor
    group.abort()
    with pytest.raises(CommAbortedError, match="allreduce #2 on") as raised:
        futures[1].wait()
    assert (raised.value.op, raised.value.seq) == ("allreduce", 2)
    with pytest.raises(CommAbortedError, match="allreduce #3 on"):
        group.allreduce([tensor]).get_future().value()
    group.shutdown()


def test_callback_that_blocks_holds_up_no_other_operation(store):
    """Nor does it run on the thread that tells of the end, which may be the only one."""
    group, backend = late(store)
    begun, may_end = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def block(_future):
        threads.append(threading.current_thread())
        begun.set()
        assert may_end.wait(LIMIT)

    works = [group.allreduce([torch.ones(1)]) for _ in range(2)]
    works[0].get_future().add_done_callback(block)
    backend.futures[0].set_result([])
    assert begun.wait(LIMIT)
    backend.futures[1].set_result([])
    works[1].wait(seconds(LIMIT / 2))
    may_end.set()
    assert threading.current_thread() not in threads
    group.shutdown()


def test_operation_issued_after_a_leaving_has_a_second_in_the_backend(store):
    """The leaver may have done its part of it."""
    group, backend = late(store)
    group._formed.generation._note_leaving(PeerLeftError("rank 1 left"))
    works = [group.allreduce([torch.ones(1)]) for _ in range(2)]
    backend.futures[0].set_result([])
    works[0].wait()
    began = time.monotonic()
    with pytest.raises(PeerLeftError, match="rank 1 left"):
        works[1].wait()
    assert time.monotonic() - began < LIMIT / 2
    group.shutdown()


def test_wait_gives_up_at_its_own_limit(store):
    group, _ = late(store)
    work = group.allreduce([torch.ones(1)])
    with pytest.raises(CommTimeoutError, match=r"allreduce #1 on .*not complete after"):
        work.wait(seconds(0.05))
    assert isinstance(group.errored(), CommTimeoutError)
    with pytest.raises(CommTimeoutError):
        group.allreduce([torch.ones(1)]).wait()
    group.shutdown()


def test_failure_of_the_backend_ends_the_generation_with_its_words(store):
    group, backend = late(store)
    work = group.allreduce([torch.ones(1)])
    backend.futures[0].set_exception(OSError("the cable broke"))
    with pytest.raises(
        CommAbortedError, match=r"allreduce failed in the backend: .*the cable broke"
    ):
        work.wait()
    group.shutdown()


def test_backend_that_cannot_be_made_is_told_and_may_be_made_later(store):
    attempts = []

    def make(backend_store, rank, size, _timeout):
        attempts.append(backend_store)
        if len(attempts) == 1:
            raise OSError("no port is free")
        return Late(rank, size)

    with pytest.raises(RendezvousError, match=r"'made\d+' could not be made: no port is free"):
        alone(store, make)
    name = f"made{next(names) - 1}"
    group = pgs.ProcessGroupBackend(name, timeout=LIMIT)
    group.configure(f"127.0.0.1:{store.port}/again", 0, 1)
    assert (group.size(), group.getBackendName()) == (1, f"ft:{name}")
    group.shutdown()
    dist.init_process_group(f"ft:{name}", store=dist.HashStore(), rank=0, world_size=1)
    assert (dist.get_backend(), len(attempts)) == (f"ft:{name}", 3)
    dist.destroy_process_group()


def test_abort_releases_configure_while_the_backend_is_made(store):
    begun, may_go_on = threading.Event(), threading.Event()

    def make(_store, rank, size, _timeout):
        begun.set()
        assert may_go_on.wait(LIMIT)
        return Late(rank, size)

    name = f"made{next(names)}"
    pgs.declare_backend(name, pgs.BackendCapabilities(make=make))
    group = pgs.ProcessGroupBackend(name, timeout=LIMIT)
    with ThreadPoolExecutor(1) as other:
        call = other.submit(group.configure, f"127.0.0.1:{store.port}/{name}", 0, 1)
        assert begun.wait(LIMIT)
        group.abort()
        with pytest.raises(CommAbortedError):
            call.result(LIMIT / 2)
    may_go_on.set()
    group.shutdown()


def configured_by_two(store, make: Callable) -> list[futures.Future[None]]:
    """The calls of configure() of two threads as ranks, over a backend declared just now."""
    name = f"made{next(names)}"
    pgs.declare_backend(name, pgs.BackendCapabilities(make=make))

    def configure(rank: int) -> None:
        group = pgs.ProcessGroupBackend(name, timeout=LIMIT)
        try:
            group.configure(f"127.0.0.1:{store.port}/{name}", rank, 2)
        finally:
            group.shutdown()

    pool = ThreadPoolExecutor(2)
    calls = [pool.submit(configure, rank) for rank in range(2)]
    pool.shutdown(wait=False)
    return calls


def test_configure_waits_until_all_members_have_their_backends(store):
    """One that left before would be missed by a member that still connects to it."""
    may_end = threading.Event()

    def make(_store, rank, size, _timeout):
        assert rank == 0 or may_end.wait(LIMIT)
        return Late(rank, size)

    calls = configured_by_two(store, make)
    with pytest.raises(TimeoutError):
        calls[0].result(0.5)
    may_end.set()
    for call in calls:
        call.result(LIMIT)


def test_configure_fails_where_another_member_has_no_backend(store):
    def make(_store, rank, size, _timeout):
        if rank == 1:
            raise OSError("no port is free")
        return Late(rank, size)

    calls = configured_by_two(store, make)
    with pytest.raises(CommAbortedError, match="could not be made: no port is free"):
        calls[0].result(LIMIT)
    with pytest.raises(RendezvousError):
        calls[1].result(LIMIT)


def test_timeout_that_is_set_counts_for_later_operations(store):
    group, _ = late(store)
    group.set_timeout(seconds(7))
    operation = group.allreduce([torch.ones(1)])._operation
    assert operation.limit == seconds(7)
    group.shutdown()


def test_backend_that_was_registered_with_torch_is_made_by_torchs_creator(store):
    asked = []

    def creator(_store, rank, size, timeout):
        asked.append((rank, size, timeout))
        return Late(rank, size)

    name = f"made{next(names)}"
    dist.Backend.register_backend(name, creator, devices=["cpu"])
    pgs.declare_backend(name, pgs.BackendCapabilities())
    group = pgs.ProcessGroupBackend(name, timeout=LIMIT)
    group.configure(f"127.0.0.1:{store.port}/{name}", 0, 1)
    assert asked == [(0, 1, seconds(LIMIT))]
    group.shutdown()


def test_backends_without_generations_are_refused_with_what_to_use():
    with pytest.raises(NotImplementedError, match=r"'mpi' cannot be made anew.*ProcessGroupHost"):
        pgs.ProcessGroupBackend("mpi")
    for name in ("ft:mpi", "ft_mpi"):
        with pytest.raises(NotImplementedError, match="'mpi' cannot be made anew"):
            dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match="'ft_gloo': expected it as a group's only backend"):
        dist.init_process_group(
            "cpu:ft_gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1
        )
    with pytest.raises(ValueError, match=r"expected a declared backend.*found 'nobodys'"):
        pgs.ProcessGroupBackend("nobodys")
    with pytest.raises(ValueError, match="expected what was declared before"):
        pgs.declare_backend("GLOO", pgs.BackendCapabilities(quiet_after_abort=True))


LEFT_AT_THE_END = """
import atexit, threading, time
atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name == "ft-guard"]))
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torchft_ext import process_group as pgs

class Never(dist.ProcessGroup):
    def allreduce(self, tensors, opts=None):
        return _create_work_from_future(Future())

make = lambda store, rank, size, timeout: Never(rank, size)
pgs.declare_backend("never", pgs.BackendCapabilities(make=make))
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group = pgs.ProcessGroupBackend("never", timeout=30.0)
group.configure(f"127.0.0.1:{store.port}/end", 0, 1)
future = group.allreduce([torch.ones(1)]).get_future()
future.add_done_callback(lambda _: time.sleep(0.3))  # on the thread that learns of the end
"""


def test_helper_holds_nothing_of_a_task_that_is_over():
    class Owner:
        def work(self) -> None:
            done.set()

    done, owner = threading.Event(), Owner()
    alive = weakref.ref(owner)
    Helpers().run(owner.work)  # the first of its thread
    assert done.wait(LIMIT)
    del owner
    wait_until(lambda: alive() is None, "the helper to let go of its task")


def test_no_thread_waits_in_the_library_when_the_interpreter_ends():
    """It would come back in the middle of the interpreter's end, and abort the process."""
    ran = subprocess.run(
        [sys.executable, "-c", LEFT_AT_THE_END], capture_output=True, text=True, timeout=100
    )
    assert (ran.stdout.strip(), ran.returncode) == ("[]", 0), ran.stderr
