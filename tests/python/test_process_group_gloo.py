"""ProcessGroupGloo: torch's gloo that may be aborted, and other backends by the same means."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import World, values_of
from rankside import (
    ErrorInfo,
    connected_store,
    describe,
    failure_of,
    kept,
    leave_default_group,
    seconds,
    wait_until,
)
from timing import AT_ONCE, assert_within
from torch._C._distributed_c10d import AllgatherOptions, _create_work_from_future
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from torchft_ext import (
    CommAbortedError,
    CommError,
    CommTimeoutError,
    RendezvousError,
    _pg_generation,
)
from torchft_ext import process_group as pgs

LIMIT = 30.0  # seconds; gloo's own, after which it would notice by itself
names = itertools.count()


def join(kind: str, address: str, rank: int, size: int) -> None:
    if "group" not in kept:
        leave_default_group()
        kept["group"] = getattr(pgs, f"ProcessGroup{kind}")(timeout=LIMIT)
    kept["group"].configure(address, rank, size)


def world_of(ranks, size: int, kind: str = "Gloo") -> World:
    return joined(World(ranks, ranks.borrow(size)), kind)


def joined(world: World, kind: str = "Gloo") -> World:
    address = world.pool.address()
    values_of([world.start(r, join, kind, address, r, world.size) for r in range(world.size)])
    return world


def leave() -> None:
    kept.pop("group").shutdown()


def own(value: float = 0.0) -> torch.Tensor:
    return torch.arange(4.0) + 10 * kept["group"].rank() + value


def parts(count: int = 1) -> list[torch.Tensor]:
    """One for each rank."""
    return [own(100.0 * to)[:count].clone() for to in range(kept["group"].size())]


def empty(count: int = 1) -> list[torch.Tensor]:
    return [torch.full((count,), -1.0) for _ in range(kept["group"].size())]


def with_op(options: object, op: object) -> object:
    options.reduceOp = op
    return options


def sums() -> list[torch.Tensor]:
    group, op = kept["group"], dist.ReduceOp
    average = with_op(dist.AllreduceOptions(), op.AVG)
    floats, integers, strided = own(), own().long(), own().reshape(2, 2).t()
    first, second, at_root = own(), own(1.0), own()
    group.allreduce([floats], average).wait()
    assert average.reduceOp == op.AVG
    group.allreduce([integers], op.AVG).wait()
    group.allreduce([strided]).wait()
    group.allreduce_coalesced([first, second]).wait()
    reduce_options = with_op(dist.ReduceOptions(), op.MAX)
    reduce_options.rootRank = 1
    group.reduce([at_root], reduce_options).wait()
    return [floats, integers, strided, first, second, at_root]


def scattered_sums() -> list[torch.Tensor]:
    group, op = kept["group"], dist.ReduceOp
    listed, based, averaged, two = (torch.empty(1), torch.empty(1), torch.empty(1), torch.empty(2))
    group.reduce_scatter([listed], [parts()]).wait()
    group._reduce_scatter_base(based, torch.cat(parts()), dist.ReduceScatterOptions()).wait()
    average = with_op(dist.ReduceScatterOptions(), op.AVG)
    inputs = [torch.cat(parts()), torch.cat(parts(2))]
    group.reduce_scatter_tensor_coalesced([averaged, two], inputs, average).wait()
    return [listed, based, averaged, two]


def exchanges() -> list[torch.Tensor]:
    group, rank, size = kept["group"], kept["group"].rank(), kept["group"].size()
    lists, single, gathered, based = empty(), torch.empty(size), empty(4), torch.empty(4 * size)
    root = size - 1
    group.alltoall(lists, parts()).wait()
    group.alltoall_base(single, torch.cat(parts()), [], []).wait()
    group.allgather([gathered], [own()]).wait()
    group._allgather_base(based, own(), AllgatherOptions()).wait()
    at_root = empty(4) if rank == root else []
    gather = dist.GatherOptions()
    gather.rootRank = root
    group.gather([at_root] if rank == root else [], [own()], gather).wait()
    scatter, piece = dist.ScatterOptions(), torch.empty(1)
    scatter.rootRank = root
    group.scatter([piece], [parts()] if rank == root else [], scatter).wait()
    sent = own()
    group.broadcast_one(sent, root).wait()
    group.barrier().wait()
    return [*lists, single, *gathered, based, *at_root, piece, sent]


def messages() -> list[torch.Tensor]:
    """From rank 0 to 1, whose receive has a future, and from 2 to whoever asks."""
    group, rank = kept["group"], kept["group"].rank()
    tensor, anyone = own(), own()
    if rank == 0:
        group.send([tensor], 1, 7).wait()
    elif rank == 1:
        (tensor,) = group.recv([tensor], 0, 7).get_future().wait()
        work = group.recv_anysource([anyone], 8)
        work.wait()
        assert work._source_rank() == 2
    else:
        group.send([anyone], 1, 8).wait()
    return [tensor, anyone]


def results_of(operations: Callable[[], list[torch.Tensor]]) -> list[object]:
    return [tensor.tolist() for tensor in operations()]


@pytest.mark.parametrize("operations", [sums, scattered_sums, exchanges, messages])
def test_gloo_gives_what_our_own_engine_gives(ranks, operations):
    results = []
    for kind in ("Host", "Gloo"):
        world = world_of(ranks, 3, kind)
        results.append(world.run(results_of, operations))
        world.run(leave)
    assert results[0] == results[1]


def blocked_sum() -> tuple[ErrorInfo, list[float]]:
    """A sum that not all ranks take part in; its failure, and the tensor after it."""
    tensor = own()
    error = failure_of(lambda: kept["group"].allreduce([tensor]).wait())
    assert error is not None
    return error, (tensor - own()).tolist()


def await_blocked() -> None:
    generation = kept["group"]._formed.generation
    wait_until(lambda: generation.busy() > 0, "an operation")


def start_blocked(world: World, count: int) -> list:
    calls = [world.start(rank, blocked_sum) for rank in range(count)]
    for rank in range(count):
        world.side(rank, await_blocked)
    return calls


def test_death_releases_all_survivors_at_once_and_leaves_their_tensors(ranks):
    """Of four, where gloo's ring tells two of them and the third waits for its timeout."""

    def times() -> list[float]:
        world = world_of(ranks, 4)
        calls = start_blocked(world, 3)
        killed = time.monotonic()
        world.kill(3)
        found = values_of(calls)
        assert [error.type for error, _ in found] == ["PeerLostError"] * 3
        assert ["allreduce #1 on 'ProcessGroupGloo" in error.text for error, _ in found] == [
            True
        ] * 3
        assert [left for _, left in found] == [[0.0] * 4] * 3
        survivors = joined(World(ranks, world.workers[:3]))
        assert survivors.run(whole_sum) == [36.0] * 3
        survivors.run(leave)
        return [error.at - killed for error, _ in found]

    assert_within(AT_ONCE, times)


def whole_sum() -> float:
    tensor = own()
    kept["group"].allreduce([tensor]).wait()
    return tensor[0].item() + 6


def abort() -> float:
    began = time.monotonic()
    kept["group"].abort()
    return began


def test_abort_on_one_rank_releases_all(ranks):
    def times() -> list[float]:
        world = world_of(ranks, 3)
        calls = start_blocked(world, 2)
        began = world.side(2, abort)
        found = values_of(calls)
        assert [error.type for error, _ in found] == ["CommAbortedError"] * 2
        assert [left for _, left in found] == [[0.0] * 4] * 2
        world.run(leave)
        return [error.at - began for error, _ in found]

    assert_within(AT_ONCE, times)


@pytest.mark.parametrize("kind", ["Gloo", "BabyHost", "BabyGloo"])
def test_leaving_member_is_named_to_all_that_wait_for_it(ranks, kind):
    """Though the backend sees a closed connection first, and the last to leave ends at once."""

    def times() -> list[float]:
        world = world_of(ranks, 3, kind)
        calls = start_blocked(world, 2)
        began = time.monotonic()
        world.side(2, leave)
        found = values_of(calls)
        assert [error.type for error, _ in found] == ["PeerLeftError"] * 2
        assert ["rank 2" in error.text for error, _ in found] == [True] * 2
        for rank in (0, 1):
            world.on(rank, leave)
        return [error.at - began for error, _ in found]

    assert_within(AT_ONCE, times)


def exchanged(peer: int) -> float:
    """A message to and from the other rank."""
    group, mine, theirs = kept["group"], own(), torch.empty(4)
    sent = group.send([mine], peer, 0)
    group.recv([theirs], peer, 0).wait()
    sent.wait()
    return theirs[0].item()


def failed_sum() -> tuple[str, str]:
    """Of a sum, and of the group after it."""
    error = failure_of(lambda: kept["group"].allreduce([own()]).wait())
    assert error is not None
    return error.type, type(kept["group"].errored()).__name__


@pytest.mark.parametrize("kind", ["Host", "Gloo", "BabyHost"])
def test_messages_of_others_go_on_after_a_member_has_left(ranks, kind):
    world = world_of(ranks, 3, kind)
    world.on(2, leave)
    for _ in range(2):
        calls = [world.start(rank, exchanged, 1 - rank) for rank in (0, 1)]
        assert values_of(calls) == [10.0, 0.0]
    calls = [world.start(rank, failed_sum) for rank in (0, 1)]
    assert values_of(calls) == [("PeerLeftError", "PeerLeftError")] * 2
    for rank in (0, 1):
        world.on(rank, leave)


def received_from(peer: int) -> ErrorInfo:
    error = failure_of(lambda: kept["group"].recv([own()], peer, 0).wait())
    assert error is not None
    return error


@pytest.mark.parametrize("kind", ["Gloo", "BabyHost"])
def test_message_of_a_member_that_leaves_ends_though_it_is_in_its_backend(ranks, kind):
    """The leaver waits for a message itself, so that gloo keeps its connections."""
    world = world_of(ranks, 2, kind)
    waiting = world.start(0, received_from, 1)
    giving_up = world.start(1, received_from, 0)
    for rank in (0, 1):
        world.side(rank, await_blocked)
    began = time.monotonic()
    world.side(1, leave)
    error = waiting.value()
    assert error.type == "PeerLeftError"
    assert error.at - began < LIMIT / 2
    giving_up.value()
    world.on(0, leave)


def backend_tells_first() -> None:
    """As where a connection is seen closed before the guard tells of the death."""
    generation = kept["group"]._formed.generation
    wait_until(lambda: generation.leaving() is not None, "the leaving")
    _pg_generation._VERDICT, _pg_generation._DEATH_IS_TOLD = LIMIT, 0.0
    (operation,) = generation._pending
    generation.report(operation, RuntimeError("Connection closed by peer"))


def usual_times(verdict: float, death_is_told: float) -> None:
    _pg_generation._VERDICT, _pg_generation._DEATH_IS_TOLD = verdict, death_is_told


def test_death_after_a_leaving_is_told_as_a_death(ranks):
    world = world_of(ranks, 3)
    world.on(2, leave)
    waiting = world.start(0, received_from, 1)
    world.side(0, await_blocked)
    world.side(0, backend_tells_first)
    world.kill(1)
    error = waiting.value()
    world.on(0, usual_times, _pg_generation._VERDICT, _pg_generation._DEATH_IS_TOLD)
    assert (error.type, error.cause["rank"]) == ("PeerLostError", 1)
    world.on(0, leave)


def leave_within(*_: object) -> None:
    kept["group"].shutdown()
    raise RuntimeError("left")


def join_and_leave(address: str, rank: int, size: int) -> None:
    """This rank leaves while its gloo is being made."""
    pgs.declare_backend("leaving", pgs.BackendCapabilities(make=leave_within))
    kept["group"] = pgs.ProcessGroupBackend("leaving", LIMIT)
    failure_of(lambda: kept["group"].configure(address, rank, size))


def test_leaving_while_gloo_connects_ends_configure(ranks):
    world, address = World(ranks, ranks.borrow(3)), ranks.address()
    world.start(2, join_and_leave, address, 2, 3)
    began = time.monotonic()
    calls = [world.start(rank, join_failing, address, rank, 3) for rank in range(2)]
    found = values_of(calls)
    assert {error.type for error in found} <= {"PeerLeftError", "CommAbortedError"}
    assert all(error.at - began < LIMIT / 2 for error in found)
    world.run(leave)


def generation_after_a_leaving() -> bool:
    """Whether a generation goes with its group, without a collection of cycles."""
    gc.collect()
    gc.disable()
    try:
        wait_until(lambda: kept["group"]._formed.generation.leaving() is not None, "the leaving")
        watched = weakref.ref(kept["group"]._formed.generation)
        kept.pop("group").shutdown()
        wait_until(lambda: watched() is None, "the end of the generation")
    finally:
        gc.enable()
    return True


def test_generation_that_a_member_left_is_in_no_cycle(ranks):
    world = world_of(ranks, 2)
    world.on(1, leave)
    assert world.on(0, generation_after_a_leaving)


def handle(kind: str) -> str:
    leave_default_group()
    kept["group"] = getattr(pgs, f"ProcessGroup{kind}")(timeout=LIMIT)
    return kept["group"].get_reconfigure_handle()


def meet(handles: list[str], uuid: int) -> tuple[int, int, float]:
    """As torch's reconfigure() is called since 2.14."""
    group = kept["group"]
    group.reconfigure(SimpleNamespace(handles=handles, uuid=uuid, timeout=None)).wait()
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    return group.rank(), group.size(), tensor.item()


@pytest.mark.parametrize("kind", ["Host", "Gloo", "BabyHost"])
def test_members_meet_by_their_handles_alone(ranks, kind):
    world = World(ranks, ranks.borrow(3))
    handles = world.run(handle, kind)
    assert world.run(meet, handles, 1) == [(rank, 3, 3.0) for rank in range(3)]
    calls = [world.start(rank, meet, [handles[2], handles[0]], 2) for rank in (2, 0)]
    assert values_of(calls) == [(0, 2, 2.0), (1, 2, 2.0)]
    world.run(leave)


def test_bad_handles_are_refused_and_leave_the_group():
    group = pgs.ProcessGroupHost(timeout=LIMIT)
    own, other = group.get_reconfigure_handle(), pgs.ProcessGroupHost().get_reconfigure_handle()
    group.reconfigure(SimpleNamespace(handles=[own], uuid=1, timeout=None)).wait()
    for handles, words in [
        ({own}, "in the order of ranks"),
        ([], "in the order of ranks"),
        ([other], "own once, found it 0 times"),
        ([own, own], "own once, found it 2 times"),
        ([own, "urn:other"], "expected those of get_reconfigure_handle"),
        ([own, '{"id": "1", "store": "nowhere"}'], "expected those of get_reconfigure_handle"),
        ([own, own + " " * 5000], "expected those of get_reconfigure_handle"),
    ]:
        with pytest.raises(ValueError, match=words):
            group.reconfigure(SimpleNamespace(handles=handles, uuid=2, timeout=None))
    assert group.errored() is None
    group.shutdown()


@pytest.mark.parametrize("kind", ["Host", "Gloo"])
def test_limit_of_reconfigure_is_the_one_that_it_is_given(kind):
    group = getattr(pgs, f"ProcessGroup{kind}")(timeout=LIMIT)
    absent = pgs.ProcessGroupHost().get_reconfigure_handle()
    handles = [group.get_reconfigure_handle(), absent]
    for wrapped in (group, pgs.ProcessGroupWrapper(group)):
        own = [wrapped.get_reconfigure_handle(), absent] if wrapped is not group else handles
        began = time.monotonic()
        with pytest.raises(CommTimeoutError):
            wrapped.reconfigure(SimpleNamespace(handles=own, uuid=1, timeout=seconds(2.0)))
        assert time.monotonic() - began < LIMIT / 2
    group.shutdown()


def go_through_generations(address: str, rank: int, size: int, count: int) -> list[float]:
    """In each one sum; who has it begins the next generation at once."""
    sums = []
    for number in range(count):
        join("Gloo", f"{address}/{number}", rank, size)
        tensor = torch.full((2**18,), 1.0)
        kept["group"].allreduce([tensor]).wait()
        sums.append(tensor[-1].item())
    return sums


def test_slower_members_complete_the_last_operation_of_those_that_went_on(ranks):
    world, address = World(ranks, ranks.borrow(3)), ranks.address()
    calls = [world.start(r, go_through_generations, address, r, 3, 20) for r in range(3)]
    assert values_of(calls) == [[3.0] * 20] * 3
    world.run(leave)


def short_sum() -> ErrorInfo:
    group = kept["group"]
    options = dist.AllreduceOptions()
    options.timeout = seconds(0.3)
    error = failure_of(lambda: group.allreduce([torch.ones(1)], options).wait())
    wait_until(lambda: group.errored() is not None, "errored()")
    assert error is not None
    return error


def await_failure() -> ErrorInfo:
    group = kept["group"]
    wait_until(lambda: group.errored() is not None, "errored()")
    return describe(group.errored())


def test_timeout_ends_the_generation_everywhere(ranks):
    world = world_of(ranks, 2)
    late = world.on(0, short_sum)
    assert (late.type, late.fields["op"], late.fields["limit"]) == (
        "CommTimeoutError",
        "allreduce",
        0.3,
    )
    assert "allreduce #1 on rank 0 timed out" in world.on(1, await_failure).text
    world.run(leave)


def backward_failing() -> ErrorInfo:
    model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=kept["group"])
    loss = model(torch.ones(1, 2)).sum()
    kept["ready"] = True
    error = failure_of(loss.backward)
    assert error is not None
    return error


def wrap() -> None:
    DistributedDataParallel(torch.nn.Linear(2, 1), process_group=kept["group"])


def await_ready() -> None:
    wait_until(lambda: "ready" in kept, "the backward pass")


def test_backward_of_ddp_fails_with_the_text_of_the_death(ranks):
    world = world_of(ranks, 2)
    call = world.start(0, backward_failing)
    world.on(1, wrap)
    world.side(0, await_ready)
    world.kill(1)
    error = call.value()
    assert error.type == "RuntimeError"
    assert "PeerLostError: allreduce #" in error.text and "its process ended" in error.text
    world.on(0, leave)


def drop() -> None:
    """Without shutdown()."""
    del kept["group"]
    gc.collect()


def test_members_learn_of_a_group_that_was_dropped(ranks):
    world = world_of(ranks, 2)
    world.on(0, drop)
    assert world.on(1, await_failure).type in ("PeerLeftError", "PeerLostError", "CommAbortedError")
    world.on(1, leave)


def join_failing(address: str, rank: int, size: int) -> ErrorInfo:
    error = failure_of(lambda: join("Gloo", address, rank, size))
    assert error is not None
    return error


def make_and_die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def join_and_die(address: str, rank: int, size: int) -> None:
    """This rank's gloo begins to be made, and its process ends."""
    pgs.declare_backend("dying", pgs.BackendCapabilities(make=make_and_die))
    kept["group"] = pgs.ProcessGroupBackend("dying", LIMIT)
    kept["group"].configure(address, rank, size)


def test_death_while_gloo_connects_ends_configure(ranks):
    world, address = World(ranks, ranks.borrow(3)), ranks.address()
    world.start(2, join_and_die, address, 2, 3)
    calls = [world.start(rank, join_failing, address, rank, 3) for rank in range(2)]
    assert [error.type for error in values_of(calls)] == ["PeerLostError"] * 2
    survivors = joined(World(ranks, world.workers[:2]))
    assert survivors.run(whole_sum) == [16.0] * 2
    survivors.run(leave)


def init_named(address: str, rank: int, size: int) -> list[object]:
    """A default group by name, used by torch.distributed's functions, and configured."""
    leave_default_group()
    store = connected_store(address)
    limit = seconds(LIMIT)
    dist.init_process_group("ft:gloo", store=store, rank=rank, world_size=size, timeout=limit)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, rank)
    dist.barrier()
    part = dist.new_group([0, 1], backend="ft_gloo")
    if rank < 2:
        dist.all_reduce(tensor, group=part)
    return [dist.get_backend(), tensor.item(), objects]


def configure_named(address: str, rank: int, size: int) -> list[object]:
    group = dist.group.WORLD
    wait_until(lambda: group.errored() is not None, "errored()")
    group.configure(address, rank, size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    found = [tensor.item(), dist.get_rank(), dist.get_world_size()]
    dist.destroy_process_group()
    return found


def test_name_makes_a_default_group_that_goes_on_after_a_death(ranks):
    world, address = World(ranks, ranks.borrow(3)), ranks.address()
    found = values_of([world.start(r, init_named, address, r, 3) for r in range(3)])
    sums = [6.0, 6.0, 3.0]
    assert found == [["ft:gloo", sums[r], [0, 1, 2]] for r in range(3)]
    world.kill(2)
    address = ranks.address()
    found = values_of([world.start(r, configure_named, address, r, 2) for r in range(2)])
    assert found == [[2.0, 0, 2], [2.0, 1, 2]]


# ---- backends of the program's own, in this process alone ----


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


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


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


def test_future_has_the_outputs_or_the_failures_text(store):
    group, backend = late(store)
    tensor = torch.ones(1)
    futures = [group.allreduce([tensor]).get_future() for _ in range(2)]
    backend.futures[0].set_result([])
    assert futures[0].wait()[0] is tensor
    group.abort()
    with pytest.raises(RuntimeError, match="CommAbortedError: allreduce #2 on"):
        futures[1].wait()
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


def held() -> dict[str, int]:
    """Threads and descriptors of this process."""
    return {name: len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")}


def test_generations_leave_no_threads_and_no_descriptors(store):
    group = pgs.ProcessGroupGloo(timeout=LIMIT)

    def generations(name: str, count: int) -> None:
        for number in range(count):
            group.configure(f"127.0.0.1:{store.port}/{name}{number}", 0, 1)
            group.allreduce([torch.ones(1)]).wait()
        wait_until(lambda: group.retired() == 0, "the end of old backends")

    generations("first", 3)
    before = held()
    generations("more", 20)

    def as_before() -> bool:
        return all(count <= before[name] for name, count in held().items())

    wait_until(as_before, f"threads and descriptors as before: {before}")
    group.shutdown()


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


def test_group_may_be_configured_again_after_shutdown(store):
    group = pgs.ProcessGroupGloo(timeout=LIMIT)
    with pytest.raises(RuntimeError, match="expected configure\\(\\) before"):
        group.allreduce([torch.ones(1)])
    for number in range(2):
        group.configure(f"127.0.0.1:{store.port}/again{number}", 0, 1)
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        group.shutdown()
        with pytest.raises(CommError, match="shutdown\\(\\) was called"):
            group.allreduce([tensor]).wait()


def test_bad_arguments_are_told_and_leave_the_generation(store):
    group = pgs.ProcessGroupGloo(timeout=LIMIT)
    group.configure(f"127.0.0.1:{store.port}/bad", 0, 1)
    with pytest.raises(ValueError, match="expected an input of 2 elements, found 3"):
        group._reduce_scatter_base(torch.empty(2), torch.empty(3), dist.ReduceScatterOptions())
    with pytest.raises(ValueError, match="expected tensors on the CPU, found one on meta"):
        group.allreduce([torch.ones(1, device="meta")])
    with pytest.raises(RuntimeError, match="no tensor arguments"):
        group.allreduce([])
    assert group.errored() is None
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    group.shutdown()


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


def test_no_thread_waits_in_the_library_when_the_interpreter_ends():
    """It would come back in the middle of the interpreter's end, and abort the process."""
    ran = subprocess.run(
        [sys.executable, "-c", LEFT_AT_THE_END], capture_output=True, text=True, timeout=100
    )
    assert (ran.stdout.strip(), ran.returncode) == ("[]", 0), ran.stderr
