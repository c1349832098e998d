"""The completion hook of c10d: told of every operation that is over, by a thread of its own."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import values_of
from rankside import (
    OPERATION_LIMIT,
    PATIENCE,
    ErrorInfo,
    abort,
    backend,
    configure_next,
    failure_of,
    seconds,
    wait_until,
)
from values import check_sum, me

told: list[object] = []


def register(hook=None) -> None:
    told.clear()
    dist.group.WORLD._register_on_completion_hook(hook or told.append)


def pending_works() -> None:
    dist.group.WORLD._wait_for_pending_works()


def every_operation() -> list[tuple[str, int]]:
    group = dist.group.WORLD
    assert not group._has_hooks()
    dist.barrier()  # before there is a hook: untold
    register()
    assert group._has_hooks()
    for work in [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]:
        work.wait()
    dist.broadcast(torch.ones(3), 0)
    _, world = me()
    out = [torch.zeros(2) for _ in range(world)]
    dist.all_gather(out, torch.ones(2))
    dist.barrier()
    pending_works()
    for info in told:
        assert info.time_finished >= info.time_started
        assert seconds(OPERATION_LIMIT) > info.active_duration >= seconds(0)
    return [(str(info.op_type).rsplit(".", 1)[-1], info.seq) for info in told]


def test_hook_is_told_of_every_operation_in_order(ranks):
    names = ["ALLREDUCE"] * 3 + ["BROADCAST", "ALLGATHER", "BARRIER"]
    for seen in ranks.fresh(2).run(every_operation):
        assert [name for name, _ in seen] == names
        assert [seq for _, seq in seen] == sorted({seq for _, seq in seen})


def thread_of_hook() -> tuple[str, bool]:
    """The name of the hook's thread, and whether the hook may call the group."""
    names: list[str] = []

    def hook(_info: object) -> None:
        task = threading.get_native_id()
        names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
        backend().stats()
        assert backend().errored() is None
        names.append(failure_of(pending_works).text)  # it would wait for itself

    register(hook)
    check_sum()
    pending_works()
    return names[0], "wait for itself" in names[1]


def test_hook_runs_on_the_callback_thread_and_may_call_its_group(ranks):
    assert ranks.fresh(2).run(thread_of_hook) == [("ft-callback", True)] * 2


def blocked_hook() -> ErrorInfo:
    released = threading.Event()
    register(lambda _info: released.wait(PATIENCE))
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(4)]
    for work in works:
        work.wait()  # progress does not depend on the hook
    backend().set_timeout(seconds(0.3))
    error = failure_of(pending_works)
    backend().set_timeout(seconds(OPERATION_LIMIT))
    assert backend().errored() is None
    released.set()
    pending_works()
    check_sum()
    return error


def test_hook_that_blocks_holds_up_no_operation_and_the_wait_for_it_ends(ranks):
    for error in ranks.fresh(2).run(blocked_hook):
        assert error.type == "CommTimeoutError"
        assert "has not returned from 4 operations" in error.text


def throwing_hook() -> int:
    def hook(info: object) -> None:
        told.append(info)
        raise ValueError("from the hook")

    register(hook)
    for _ in range(3):
        check_sum()
    pending_works()
    return len(told)


def test_hook_that_raises_is_called_again(ranks):
    assert ranks.fresh(2).run(throwing_hook) == [3, 3]


def second_hook() -> str:
    register()
    return failure_of(lambda: dist.group.WORLD._register_on_completion_hook(print)).text


def test_second_hook_is_refused(ranks):
    (text,) = ranks.fresh(1).run(second_hook)
    assert "another one registered" in text


def hook_is_told() -> None:
    register()
    check_sum()
    pending_works()
    assert len(told) == 1


def abort_is_not_told() -> None:
    if me()[0] == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)  # nobody joins in
        abort()
        assert failure_of(work.wait).type == "CommAbortedError"
    else:
        wait_until(lambda: backend().errored() is not None, "the abort")
    assert failure_of(lambda: dist.all_reduce(torch.ones(3))).type == "CommAbortedError"
    pending_works()
    assert len(told) == 1


def hook_of_the_next_generation() -> int:
    check_sum()
    pending_works()
    return len(told)


def test_failed_operations_are_not_told_and_the_hook_outlives_the_generation(ranks):
    world = ranks.fresh(2)
    world.run(hook_is_told)
    world.run(abort_is_not_told)
    address = ranks.address()
    calls = [world.start(rank, configure_next, address, 1 - rank, 2) for rank in range(2)]
    values_of(calls, PATIENCE)
    assert world.run(hook_of_the_next_generation) == [2, 2]


def aborting_hook() -> str:
    def hook(_info: object) -> None:
        abort("from the hook")
        told.append(_info)

    register(hook)
    check_sum()
    pending_works()
    assert len(told) == 1
    return failure_of(lambda: dist.all_reduce(torch.ones(1))).type


def test_hook_may_abort_its_group(ranks):
    assert ranks.fresh(1).run(aborting_hook) == ["CommAbortedError"]
