"""ProcessGroupGloo: torch's gloo that may be aborted, and what becomes of its waiters."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from process_group_side import (
    LIMIT,
    abort,
    await_blocked,
    await_failure,
    blocked_sum,
    exchanges,
    held,
    join_failing,
    joined,
    leave,
    messages,
    own,
    results_of,
    scattered_sums,
    start_blocked,
    sums,
    whole_sum,
    world_of,
)
from ranks import World, values_of
from rankside import (
    ErrorInfo,
    connected_store,
    failure_of,
    kept,
    leave_default_group,
    seconds,
    wait_until,
)
from timing import AT_ONCE, assert_within
from torch._C._distributed_c10d import AllgatherOptions
from torch.nn.parallel import DistributedDataParallel

from torchft_ext import CommError, _pg_generation
from torchft_ext import process_group as pgs


@pytest.mark.parametrize("operations", [sums, scattered_sums, exchanges, messages])
def test_gloo_gives_what_our_own_engine_gives(ranks, operations):
    results = []
    for kind in ("Host", "Gloo"):
        world = world_of(ranks, 3, kind)
        results.append(world.run(results_of, operations))
        world.run(leave)
    assert results[0] == results[1]


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


def short_sum() -> ErrorInfo:
    group = kept["group"]
    options = dist.AllreduceOptions()
    options.timeout = seconds(0.3)
    error = failure_of(lambda: group.allreduce([own()], options).wait())
    wait_until(lambda: group.errored() is not None, "errored()")
    assert error is not None
    return error


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


def wait_for_verdicts(limit: float) -> None:
    """How long a failure whose cause the backend does not know waits for the news of it."""
    _pg_generation._VERDICT = limit


@pytest.mark.parametrize(
    ("kind", "verdict"), [("Gloo", LIMIT), ("BabyHost", 0.0), ("BabyGloo", LIMIT)]
)
def test_timeout_of_one_member_is_told_to_others_in_its_name(ranks, kind, verdict):
    """Rank 1 waits in the same operation, with a limit that has not passed. The native child knows
    whose had."""
    world = world_of(ranks, 3, kind)
    world.on(1, wait_for_verdicts, verdict)
    waiting = world.start(1, blocked_sum)
    world.side(1, await_blocked)
    late = world.on(0, short_sum)
    error, _ = waiting.value()
    world.on(1, wait_for_verdicts, _pg_generation._VERDICT)
    assert (late.type, late.fields["limit"]) == ("CommTimeoutError", 0.3)
    assert error.type == "CommAbortedError"
    assert "allreduce #1 on rank 0 timed out" in error.text
    assert "allreduce #1 on rank 0 timed out" in world.on(2, await_failure).text
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


def test_backward_of_ddp_raises_the_death(ranks):
    world = world_of(ranks, 2)
    call = world.start(0, backward_failing)
    world.on(1, wrap)
    world.side(0, await_ready)
    world.kill(1)
    error = call.value()
    assert (error.type, error.fields["op"]) == ("PeerLostError", "allreduce")
    assert "its process ended" in error.text
    world.on(0, leave)


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

    def as_before() -> bool:  # but for what the pool of ranks holds, whose ranks come and go
        return all(count < before[name] + 20 for name, count in held().items())

    wait_until(as_before, f"threads and descriptors as before: {before}")
    group.shutdown()


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


class Local:
    """What a caller's frame holds."""


def fail_with_a_future(take: str, tensor: torch.Tensor) -> tuple[str, weakref.ref]:
    held, work = Local(), kept["group"].allreduce([tensor])
    future = work.get_future()
    kept["group"].abort()
    if take == "work":
        assert failure_of(lambda: (held, work.wait())) is not None
    return failure_of(lambda: (held, future.wait())).type, weakref.ref(held)


def failed_operation_is_let_go(take: str) -> tuple[str, bool, bool]:
    """How its future failed; whether its tensor, and the frames that it was raised in, are gone."""
    tensor = torch.ones(4)
    given = weakref.ref(tensor)
    kind, held = fail_with_a_future(take, tensor)
    del tensor
    gc.collect()
    return kind, given() is None, held() is None


@pytest.mark.parametrize("take", ["future", "work"])
@pytest.mark.parametrize("kind", ["Host", "Gloo", "BabyHost"])
def test_failed_operation_is_let_go_though_its_future_was_taken(ranks, kind, take):
    world = world_of(ranks, 2, kind)
    assert world.on(0, failed_operation_is_let_go, take) == ("CommAbortedError", True, True)
    world.run(leave)


def results_by_their_new_names() -> list[list[float]]:
    """As torch calls these operations since 2.15."""
    group, size = kept["group"], kept["group"].size()
    gathered, exchanged = torch.empty(4 * size), torch.empty(size)
    summed = torch.empty(2)
    group.all_gather_single(gathered, own(), AllgatherOptions()).wait()
    numbers = torch.arange(float(size)) + 10 * group.rank()
    group.all_to_all_single(exchanged, numbers, [], [], dist.AllToAllOptions()).wait()
    group.reduce_scatter_single(summed, torch.ones(2 * size), dist.ReduceScatterOptions()).wait()
    return [gathered.tolist(), exchanged.tolist(), summed.tolist()]


@pytest.mark.parametrize("kind", ["Gloo", "BabyHost"])
def test_operations_are_known_by_torchs_new_names_too(ranks, kind):
    world = world_of(ranks, 2, kind)
    gathered = [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
    assert world.run(results_by_their_new_names) == [
        [gathered, [float(rank), 10.0 + rank], [2.0, 2.0]] for rank in range(2)
    ]
    world.run(leave)
