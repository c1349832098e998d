"""Memory pools that are registered with NCCL: through generations, given back, refused, let go."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from typing import Any

import device_side
import pytest
import rankside
import torch
import torch.distributed as dist
from device_side import accelerator, check_sum, no_violation, ones, reaped
from rankside import ErrorInfo, abort, backend, failure_of, kept, seconds, wait_until
from values import check, me

simulated_only = pytest.mark.skipif(not accelerator.nccl_simulated(), reason="injects faults")


def registered_are(expected: int) -> None:
    """Where it can be counted."""
    if accelerator.registrations() is not None:
        wait_until(lambda: accelerator.registrations() == expected, f"{expected} registrations")


def add_pool(name: str = "pool", segments: int = 1) -> None:
    """Register a new pool, which is remembered with its tensors."""
    pool = accelerator.mem_pool()
    kept[name] = pool
    kept[name + " tensors"] = []
    add_segments(name, segments)


def add_segments(name: str = "pool", segments: int = 1) -> None:
    """Register the pool once more, with tensors that need memory of their own."""
    for _ in range(segments):
        made = accelerator.made_in(kept[name], lambda: ones(3 << 20))
        kept[name + " tensors"].append(made)
    backend().register_mem_pool(kept[name])


def drop_pool(name: str = "pool") -> None:
    backend().deregister_mem_pool(kept[name])
    del kept[name + " tensors"], kept[name]


def sum_in_pool(name: str = "pool") -> None:
    """An all_reduce of a registered tensor, exact."""
    rank, world = me()
    tensor = kept[name + " tensors"][0]
    tensor.fill_(rank + 1.0)
    dist.all_reduce(tensor)
    backend().check()
    expected = torch.full_like(tensor, world * (world + 1) / 2, device="cpu")
    check(tensor.cpu(), expected, "the sum in registered memory")


def ended_clean() -> None:
    abort()
    torch.accelerator.synchronize()
    reaped()
    registered_are(0)
    no_violation()


def before_and_after_the_first_use(first: bool) -> None:
    if not first:
        check_sum()
    add_pool()
    sum_in_pool()
    registered_are(1)
    drop_pool()
    registered_are(0)
    check_sum()
    no_violation()


@pytest.mark.parametrize("first", (True, False), ids=("first", "later"))
def test_pool_is_registered_before_or_after_the_first_use_and_given_back(devices, first):
    devices.world(2).run(before_and_after_the_first_use, first)


def again_with_more() -> None:
    check_sum()
    add_pool()
    backend().register_mem_pool(kept["pool"])
    registered_are(1)
    add_segments(segments=2)
    registered_are(3)
    sum_in_pool()
    drop_pool()
    registered_are(0)
    no_violation()


def test_pool_registered_again_gets_the_segments_that_have_come_since(devices):
    devices.world(2).run(again_with_more)


def fail_generation() -> None:
    if me()[0] == 0:
        abort()
    assert rankside.wait_errored() is not None


def test_registration_survives_generations_that_end_well_and_that_fail(devices):
    world = devices.world(3)
    world.run(add_pool)
    world.run(sum_in_pool)
    larger = devices.next(world, [2, 0, 1])
    larger.run(sum_in_pool)
    larger.run(registered_are, 1)
    world = devices.next(larger, [1, 0])
    larger.on(2, drop_pool)  # in a generation that the others have left
    world.run(sum_in_pool)
    world.run(registered_are, 1)
    world.run(fail_generation)
    world = devices.next(world, range(2))
    world.run(sum_in_pool)
    world.run(registered_are, 1)
    world.run(drop_pool)
    world.run(ended_clean)


def after_a_kill() -> None:
    assert rankside.wait_errored() is not None
    drop_pool("second")  # of a failed generation: nothing is asked, nothing waited for


def test_survivors_of_a_kill_go_on_with_their_pools(devices):
    world = devices.world(3)
    world.run(add_pool)
    world.run(add_pool, "second")
    world.run(sum_in_pool)
    world.kill(2)
    for call in [world.start(rank, after_a_kill) for rank in (0, 1)]:
        call.value()
    world = devices.next(world, range(2))
    world.run(sum_in_pool)
    world.run(registered_are, 1)
    world.run(drop_pool)
    world.run(ended_clean)


def the_pool_goes() -> None:
    """After what was to let go of it, and with the last reference here."""
    pool = weakref.ref(kept.pop("pool"))
    del kept["pool tensors"]
    gc.collect()
    assert pool() is not None, "the registration keeps it"
    kept["weak"] = pool


def it_is_gone() -> None:
    def gone() -> bool:
        gc.collect()
        return kept["weak"]() is None  # type: ignore[operator]

    wait_until(gone, "the pool's end")


def forget_group() -> None:
    weak = kept["weak"]
    device_side.leave()
    kept["weak"] = weak


def shut_down() -> ErrorInfo:
    backend().shutdown()
    return failure_of(lambda: backend().register_mem_pool(accelerator.mem_pool()))


def test_pool_is_kept_alive_until_the_group_ends(devices):
    world = devices.world(2)
    world.run(add_pool)
    world.run(sum_in_pool)
    world.run(the_pool_goes)
    for error in world.run(shut_down):
        assert error.type == "RuntimeError" and "was shut down" in error.text, error.text
    world.run(forget_group)
    world.run(it_is_gone)
    world.run(no_violation)


def deregistered_pool_goes() -> None:
    add_pool()
    sum_in_pool()
    pool = kept["pool"]
    the_pool_goes()
    backend().deregister_mem_pool(pool)
    del pool
    it_is_gone()
    no_violation()


def test_pool_goes_once_it_is_deregistered(devices):
    devices.world(2).run(deregistered_pool_goes)


def many_generations_later() -> tuple[int, int]:
    gc.collect()
    torch.accelerator.synchronize()
    reaped()
    stats = backend().stats()
    return len(stats["threads"]), len(os.listdir("/proc/self/fd"))


def test_twenty_generations_with_a_pool_leave_nothing_behind(devices):
    world = devices.world(2)
    world.run(add_pool)
    before: list[Any] = []
    for generation in range(20):
        world.run(sum_in_pool)
        if generation % 2:
            world.run(fail_generation)
        world = devices.next(world, range(2))
        if generation == 5:
            world.run(sum_in_pool)  # as at the end: the generation's communicator is alive
            before = world.run(many_generations_later)
    world.run(sum_in_pool)
    world.run(registered_are, 1)
    after = world.run(many_generations_later)
    assert all(n[0] <= b[0] + 1 and n[1] <= b[1] + 2 for n, b in zip(after, before, strict=True))
    world.run(drop_pool)
    world.run(ended_clean)


class Fake:
    """A pool that is none."""

    def __init__(self, pool_id: object = (0, 7), segments: object = ()) -> None:
        self.id = pool_id
        self._segments = list(segments) if isinstance(segments, tuple) else segments

    def snapshot(self) -> object:
        return self._segments


def segment(**changed: object) -> dict[str, object]:
    return {"address": 4096, "total_size": 64, "device": 0} | changed


REFUSED = {
    "no pool": (lambda: 3, "TypeError", "pool: expected a torch.cuda.MemPool"),
    "id of one": (lambda: Fake((3,)), "TypeError", "pool.id: expected a tuple of two ints"),
    "id of text": (lambda: Fake(("a", 1)), "TypeError", "pool.id: expected an int"),
    "no id": (lambda: Fake((0, 0)), "ValueError", "pool.id: expected that of a pool"),
    "negative id": (lambda: Fake((0, -1)), "ValueError", "pool.id: expected an int from 0"),
    "no list": (lambda: Fake(segments=5), "TypeError", "expected a list of segments, found int"),
    "no dict": (lambda: Fake(segments=(5,)), "TypeError", "snapshot()[0]: expected a dict"),
    "no size": (
        lambda: Fake(segments=({"address": 1, "device": 0},)),
        "ValueError",
        "snapshot()[0]: expected a segment with 'total_size'",
    ),
    "size 0": (lambda: Fake(segments=(segment(total_size=0),)), "ValueError", "above 0"),
    "address 0": (lambda: Fake(segments=(segment(address=0),)), "ValueError", "an address above 0"),
    "size of text": (
        lambda: Fake(segments=(segment(total_size="1"),)),
        "TypeError",
        "snapshot()[0]['total_size']: expected an int",
    ),
    "device": (lambda: Fake(segments=(segment(device=99),)), "ValueError", "found 99"),
}


def refusals() -> None:
    for name, (make, kind, text) in REFUSED.items():
        error = failure_of(lambda make=make: backend().register_mem_pool(make()))
        assert error is not None, name
        assert error.type == kind and text in error.text, f"{name}: {error.type}: {error.text}"
        assert "register_mem_pool" in error.text
    pool = accelerator.mem_pool()
    error = failure_of(lambda: backend().register_mem_pool(pool, symm=True))
    assert error.type == "NotImplementedError" and "symm" in error.text, error.text
    assert failure_of(lambda: backend().register_mem_pool(pool, symm=1)).type == "TypeError"
    error = failure_of(lambda: backend().deregister_mem_pool(pool))
    assert error.type == "ValueError" and "is registered" in error.text, error.text
    # One without segments, with another pool's, or in a snapshot without the keyword, is fine.
    other = segment(segment_pool_id=(0, 8))
    for fake in (Fake(), Fake(segments=(other,))):
        backend().register_mem_pool(fake)
        backend().deregister_mem_pool(fake)
    check_sum()
    registered_are(0)
    no_violation()


def test_bad_pools_are_refused_and_the_generation_goes_on(devices):
    devices.world(2).run(refusals)


def on_the_host() -> ErrorInfo:
    # Made here: the long-lived group serves the device too.
    store = dist.HashStore()
    import torchft_ext

    group = torchft_ext._C._create_backend(
        store, 0, 1, timeout=seconds(20), engine="host", name="host", options=None,
        may_resize=True, begin=True,
    )  # fmt: skip
    error = failure_of(lambda: group.register_mem_pool(Fake()))
    group.shutdown()
    return error


def test_group_without_nccl_refuses_pools(devices):
    error = devices.world(1).on(0, on_the_host)
    assert error.type == "NotImplementedError" and "no device engine" in error.text, error.text


# ---- NCCL's own errors


def refused_by_nccl() -> None:
    check_sum()
    accelerator.simulator().inject("fail register code=5")
    error = failure_of(add_pool)
    assert error.type == "DistBackendError" and "bytes at 0x" in error.text, error.text
    assert backend().errored() is None
    registered_are(0)
    check_sum()
    backend().register_mem_pool(kept["pool"])
    registered_are(1)
    accelerator.simulator().inject("fail deregister code=3")
    error = failure_of(drop_pool)
    assert error.type == "DistBackendError" and "keeps it to its end" in error.text, error.text
    assert failure_of(drop_pool).type == "ValueError"
    check_sum()


@simulated_only
def test_error_of_nccl_is_raised_and_the_generation_stands_on_the_simulator(devices):
    world = devices.world(2)
    world.run(refused_by_nccl)
    world.run(ended_clean)


def waits_for_operations() -> None:
    check_sum()
    add_pool()
    device_side.hold()
    work = dist.all_reduce(kept["pool tensors"][0], async_op=True)
    backend().set_timeout(seconds(0.2))
    error = failure_of(drop_pool)
    assert error.type == "CommTimeoutError", error.text
    device_side.let_go()
    assert failure_of(work.check) is not None
    ended_clean()


@simulated_only
def test_operation_that_is_not_complete_in_time_fails_the_generation_on_the_simulator(devices):
    devices.world(1).run(waits_for_operations)


def hangs_in_nccl() -> None:
    add_pool()
    sum_in_pool()
    accelerator.simulator().inject("block deregister")
    backend().set_timeout(seconds(0.3))
    error = failure_of(drop_pool)
    assert error.type == "CommTimeoutError" and "does not come back" in error.text, error.text
    assert backend().errored() is not None
    assert backend().stats()["stuck_threads"] == 1
    accelerator.simulator().inject("clear")
    wait_until(lambda: backend().stats()["stuck_threads"] == 0, "the thread that was stuck")
    ended_clean()


@simulated_only
def test_deregistration_that_hangs_is_given_up_on_the_simulator(devices):
    world = devices.world(1)
    world.run(hangs_in_nccl)
    world = devices.next(world, [0])
    world.run(check_sum)


def gil_is_free_meanwhile() -> None:
    """Other threads run Python while one waits in deregister_mem_pool()."""
    add_pool()
    sum_in_pool()
    accelerator.simulator().inject("block deregister")
    began = time.monotonic()

    def later() -> None:
        wait_until(lambda: "ft-nccl-call" in backend().stats()["threads"], "the call")
        accelerator.simulator().inject("clear")

    thread = threading.Thread(target=later)
    thread.start()
    drop_pool()
    thread.join()
    assert time.monotonic() - began < rankside.OPERATION_LIMIT
    registered_are(0)
    no_violation()


@simulated_only
def test_deregistration_lets_other_threads_run_on_the_simulator(devices):
    devices.world(1).run(gil_is_free_meanwhile)
