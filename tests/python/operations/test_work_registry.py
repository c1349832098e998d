"""torch's registry of works, which compiled code fills: nothing that was waited for stays in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from rankside import PATIENCE, abort, backend, describe, failure_of, seconds, wait_until
from torch._C._distributed_c10d import _get_work_registry_size

SIZE = 1 << 16


@contextlib.contextmanager
def registering() -> Iterator[None]:
    """torch registers every work, as around a compiled region. Nothing is left at the end."""
    with funcol.allow_inflight_collective_as_graph_input_ctx():
        before = _get_work_registry_size()
        yield
        assert _get_work_registry_size() == before, _get_work_registry_size()


def registered(tensor: torch.Tensor) -> dist.Work:
    before = _get_work_registry_size()
    work = dist.all_reduce(tensor, async_op=True)
    assert _get_work_registry_size() == before + 1
    return work


def check_of(work: dist.Work) -> None:
    work.check()


ENDS: dict[str, Callable[[dist.Work], object]] = {
    "wait": lambda work: work.wait(),
    "wait with a limit": lambda work: work.wait(seconds(PATIENCE)),
    "synchronize": lambda work: work.synchronize(),
    "check": check_of,
}


def end_in_each_way() -> None:
    for end in ENDS.values():
        with registering():
            tensor = torch.ones(SIZE)
            end(registered(tensor))
            assert tensor[0] == dist.get_world_size()


def test_waited_work_leaves_the_registry(ranks):
    ranks.world(2).run(end_in_each_way)


def synchronous_operations() -> None:
    world = dist.get_world_size()
    with registering():
        dist.all_reduce(torch.ones(SIZE))
        dist.broadcast(torch.ones(SIZE), 0)
        dist.all_gather([torch.ones(SIZE) for _ in range(world)], torch.ones(SIZE))
        dist.reduce_scatter_tensor(torch.ones(SIZE), torch.ones(world * SIZE))
        dist.barrier()


def test_synchronous_operations_leave_the_registry(ranks):
    ranks.world(2).run(synchronous_operations)


def end_a_failed_one(how: str) -> str:
    """Rank 1 never takes part."""
    with registering():
        work = registered(torch.ones(SIZE))
        if how == "abort":
            abort()
            error = failure_of(work.wait)
        else:
            error = failure_of(lambda: work.wait(seconds(0.05)))
    return error.type


@pytest.mark.parametrize(
    ("how", "kind"), [("abort", "CommAbortedError"), ("time", "CommTimeoutError")]
)
def test_work_whose_wait_raises_leaves_the_registry(ranks, how, kind):
    assert ranks.world(2).on(0, end_a_failed_one, how) == kind


def wait_for_ones_refused() -> None:
    abort()
    for _ in range(3):
        with registering():
            assert failure_of(registered(torch.ones(SIZE)).wait).type == "CommAbortedError"


def test_work_of_a_failed_generation_leaves_the_registry(ranks):
    ranks.world(2).on(0, wait_for_ones_refused)


def interrupted() -> None:
    with registering():
        work = registered(torch.ones(SIZE))
        with contextlib.suppress(KeyboardInterrupt):
            work.wait()
            raise AssertionError("it was to be interrupted")


def test_work_whose_wait_a_signal_ends_leaves_the_registry(ranks):
    from rankside import main_thread_waits_in_c

    world = ranks.world(2)
    call = world.start_blocked(0, interrupted)
    world.side(0, main_thread_waits_in_c)
    world.interrupt(0)
    call.value()


def complete_without_a_wait() -> str:
    """Its tensor's waiter is still owed the failure."""
    with registering():
        tensor, before = torch.ones(SIZE), _get_work_registry_size()
        work = registered(tensor)
        abort()
        wait_until(work.is_completed, "the end of the operation")
        assert _get_work_registry_size() == before + 1
        try:
            torch.ops._c10d_functional.wait_tensor(tensor)
        except RuntimeError as error:
            return describe(error).type
    return "nothing was raised"


def test_completion_leaves_a_failed_work_to_wait_tensor(ranks):
    assert ranks.world(2).on(0, complete_without_a_wait) == "CommAbortedError"


def coalesced_block(wait_for_each: bool) -> None:
    """As batch_isend_irecv() does where the backend coalesces."""
    group = dist.group.WORLD
    tensors = [torch.ones(SIZE), torch.ones(SIZE)]
    device = torch.device("cpu")
    with registering():
        group._start_coalescing(device)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        block = group._end_coalescing(device)
        for work in works if wait_for_each else [block]:
            work.wait()
    assert all(tensor[0] == dist.get_world_size() for tensor in tensors)


@pytest.mark.parametrize("wait_for_each", [False, True])
def test_works_of_a_coalesced_block_leave_the_registry_with_it(ranks, wait_for_each):
    ranks.world(2).run(coalesced_block, wait_for_each)


def drop_until(rounds: int) -> int:
    before = _get_work_registry_size()
    with funcol.allow_inflight_collective_as_graph_input_ctx():
        works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(rounds)]
        wait_until(lambda: all(work.is_completed() for work in works), "the sums")
    works.clear()
    return _get_work_registry_size() - before


def test_works_that_nobody_waits_for_stay_as_with_gloo(ranks):
    found = {name: ranks.fresh(2, name).run(drop_until, 5) for name in ("gloo", "ft")}
    assert found["ft"] == found["gloo"] == [5, 5]


def compiled_steps(steps: int) -> None:
    """A compiled function whose input is still being reduced."""

    @torch.compile(backend="eager", fullgraph=True)
    def halved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.ops._c10d_functional.wait_tensor(tensor) / 2

    with registering():
        for _ in range(steps):
            tensor = torch.ones(SIZE)
            dist.all_reduce(tensor, async_op=True)
            assert halved(tensor)[0] == dist.get_world_size() / 2
    assert backend().errored() is None


def test_compiled_function_takes_what_it_waits_for_out_of_the_registry(ranks):
    ranks.world(2).run(compiled_steps, 5)
