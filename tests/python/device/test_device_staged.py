"""Device tensors through host memory: ft:host with Options(staged=True), and groups in gloo's
place."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import device_side
import pytest
import test_collectives
import test_layouts
import torch
import torch.distributed as dist
from device_side import (
    accelerator,
    buffers_are_unchanged,
    device,
    hold,
    keep_buffers,
    let_go,
    no_violation,
    ones,
    stalled,
)
from device_worlds import device_environment
from ranks import World
from rankside import (
    OPERATION_LIMIT,
    ErrorInfo,
    abort,
    backend,
    connected_store,
    failure_of,
    kept,
    seconds,
    wait_errored,
    wait_until,
)
from test_collectives import digest, noise
from torch.nn.parallel import DistributedDataParallel as DDP
from values import allowed, check, me, pattern, reduced_patterns

import torchft_ext

NOTICE = 20.0  # seconds in which a failure must have reached everyone
CHAINS = [chain.name for chain in test_layouts.CHAINED]
NORMAL_STREAMS = 8  # of the simulated device, handed out in turn
HOLDS_STREAMS = pytest.mark.skipif(
    not accelerator.simulated(), reason="streams of a real device cannot all be held"
)


@pytest.fixture
def staged(devices) -> Callable[[int], World]:
    return lambda size, **options: devices.world(size, name="ft:host", staged=True, **options)


def again(devices, world: World, ranks: range) -> World:
    return devices.next(world, ranks, name="ft:host", staged=True)


def check_sum() -> None:
    rank, world = me()
    tensor = ones(33, value=rank + 1.0)
    dist.all_reduce(tensor)
    check(tensor.cpu(), torch.full((33,), world * (world + 1) / 2), "the sum over the generation")


# ---------------------------------------------------------------- results


def run_table(name: str) -> None:
    """A function of the CPU's table, with every tensor made on the device."""
    test_collectives.allowed = allowed  # which other tests change in their ranks
    if accelerator.shared_by(me()[1]):
        test_collectives.SIZES, test_collectives.LARGE = (0, 1025), 131_101
    with torch.device(device()):
        getattr(test_collectives, name)()
    no_violation()


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("name", [each.__name__ for each in test_collectives.OPERATIONS])
def test_staged_collective_gives_the_reference_result(staged, name, size):
    staged(size).run(run_table, name)


def run_layouts(name: str) -> None:
    with torch.device(device()):
        for shift in range(len(test_layouts.LAYOUTS)):
            getattr(test_layouts, name)(test_layouts.Layouts(me()[0], shift))
    no_violation()


@pytest.mark.parametrize("name", ("reductions", "copies", "exchanges"))
def test_staged_results_are_by_element_whatever_the_layouts(staged, name):
    staged(2).run(run_layouts, name)


def run_chained(name: str) -> None:
    with torch.device(device()):
        if name == "inputs":
            test_layouts.inputs_in_turn()
        else:
            test_layouts.chained(name)
    no_violation()


@pytest.mark.parametrize("name", [*CHAINS, "inputs"])
def test_staged_tensor_is_read_when_what_writes_it_before_is_stored(staged, name):
    staged(3).run(run_chained, name)


def same_bits() -> None:
    rank, _ = me()
    for dtype, size in ((torch.float32, 70_001), (torch.bfloat16, 300_007)):
        on_host = noise(rank, size, dtype)
        on_device = on_host.to(device())
        dist.all_reduce(on_host)
        dist.all_reduce(on_device)
        assert digest(on_device.cpu()) == digest(on_host), dtype
    no_violation()


@pytest.mark.parametrize("size", (2, 3))
def test_staged_sum_has_the_bits_of_the_cpus(staged, size):
    staged(size).run(same_bits)


def as_gloo(address: str) -> None:
    """Sums of whole numbers, and copies: gloo's own results."""
    rank, world = me()
    store = connected_store(address)
    gloo = dist.ProcessGroupGloo(store, rank, world, seconds(OPERATION_LIMIT))
    theirs = torch.device("cpu") if accelerator.simulated() else device()
    for size in (1, 4099, 300_007):
        results = []
        for group, place in ((backend(), device()), (gloo, theirs)):
            summed = pattern(rank, size, torch.float32).to(place)
            gathered = [torch.zeros(size, device=place) for _ in range(world)]
            group.allgather([gathered], [summed]).wait()
            group.broadcast(gathered[0], world - 1).wait()
            group.allreduce([summed]).wait()
            group.barrier().wait()
            results.append([tensor.cpu() for tensor in (summed, *gathered)])
        for ours, gloos in zip(*results, strict=True):
            check(ours, gloos, size)
    no_violation()


def test_staged_operations_give_what_gloo_gives(devices, staged):
    staged(2).run(as_gloo, devices.pool.address())


def messages() -> None:
    rank, _ = me()
    if rank == 0:
        works = [dist.isend(ones(5, value=tag + 1.0), 1, tag=tag) for tag in range(3)]
        for work in works:
            work.wait()
        dist.send(ones(4, value=7), 1)
        return
    tensors = [ones(5, value=0) for _ in range(3)]
    works = [dist.irecv(tensors[tag], 0, tag=tag) for tag in reversed(range(3))]
    for work in works:
        work.wait()
    for tag, tensor in enumerate(tensors):
        check(tensor.cpu(), torch.full((5,), tag + 1.0), tag)
    anyones = ones(4, value=0)
    assert dist.recv(anyones) == 0
    check(anyones.cpu(), torch.full((4,), 7.0), "from any rank")
    no_violation()


def test_staged_messages_arrive_by_tag_and_from_any_rank(staged):
    staged(2).run(messages)


def factors() -> None:
    rank, world = me()
    tensor, factor = ones(10), ones(1)
    with stalled():
        factor.mul_(rank + 2)
        work = dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor), async_op=True)
        del factor
        ones(1, value=9)  # in the factor's memory, were it free
    work.wait()
    check(tensor.cpu(), torch.full((10,), world * (world + 3) / 2), "the products' sum")
    no_violation()


def test_staged_factor_is_read_in_stream_order(staged):
    staged(2).run(factors)


def in_blocks() -> None:
    _, world = me()
    tensors = [ones(3, value=n) for n in range(5)]
    with dist._coalescing_manager(device=device(), async_ops=True) as block:
        for tensor in tensors:
            dist.all_reduce(tensor)
    block.wait()
    dist.all_reduce_coalesced(tensors)
    for n, tensor in enumerate(tensors):
        check(tensor.cpu(), torch.full((3,), float(n * world**2)), n)
    no_violation()


def test_staged_operations_of_a_block_give_their_results(staged):
    staged(2).run(in_blocks)


# ---------------------------------------------------------------- streams and order


def behind_the_stream() -> None:
    """Rank 1's stream stands still; what rank 0 gives arrives there meanwhile."""
    rank, world = me()
    summed, given, copied = ones(1000), ones(1000, value=rank + 5.0), ones(1000)
    word = torch.zeros(1)
    with stalled() if rank == 1 else contextlib.nullcontext():
        copied.copy_(given)
        summed.mul_(rank + 2)
        filled = dist.broadcast(given, 0, async_op=True)
        work = dist.all_reduce(summed, async_op=True)
        for _ in range(50):  # longer than the exchange
            dist.recv(word, 0) if rank == 1 else dist.send(word, 1)
            dist.send(word, 0) if rank == 1 else dist.recv(word, 1)
        assert rank == 0 or not filled.is_completed()
        assert not work.is_completed()
    work.wait()
    filled.wait()
    check(summed.cpu(), torch.full((1000,), world * (world + 3) / 2), "read behind the product")
    check(copied.cpu(), torch.full((1000,), rank + 5.0), "stored behind what read it")
    check(given.cpu(), torch.full((1000,), 5.0), "the root's")
    no_violation()


def test_staged_operation_comes_behind_its_callers_stream(staged):
    staged(2).run(behind_the_stream)


def one_order() -> None:
    """Rank 0's stream stands still: what it issues after that waits, though it is on the host."""
    rank, _ = me()
    on_device, on_host, message = ones(3), torch.ones(3), torch.zeros(1)
    with stalled() if rank == 0 else contextlib.nullcontext():
        first = dist.all_reduce(on_device, async_op=True)
        second = dist.all_reduce(on_host.mul_(rank + 1), async_op=True)
        if rank == 0:  # a message is held up by no collective
            dist.send(torch.ones(1), 1)
            assert not first.is_completed() and not second.is_completed()
        else:
            dist.recv(message, 0)
    first.wait()
    second.wait()
    check(on_device.cpu(), torch.full((3,), 2.0), "of the device")
    check(on_host, torch.full((3,), 3.0), "of the host")
    no_violation()


def test_operations_on_both_kinds_of_memory_share_one_order(staged):
    staged(2).run(one_order)


def sends_in_order() -> None:
    rank, _ = me()
    if rank == 0:
        with stalled():
            works = [dist.isend(ones(1, value=1), 1), dist.isend(torch.full((1,), 2.0), 1)]
        for work in works:
            work.wait()
        return
    found = [torch.zeros(1), torch.zeros(1)]
    for tensor in found:
        dist.recv(tensor, 0)
    assert [tensor.item() for tensor in found] == [1.0, 2.0]


def test_send_does_not_overtake_one_whose_tensor_is_not_ready(staged):
    staged(2).run(sends_in_order)


def many_in_flight() -> None:
    rank, world = me()
    tensors = [pattern(rank, 1 + 97 * n, torch.float32, salt=n).to(device()) for n in range(30)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for n, tensor in enumerate(tensors):
        check(tensor.cpu(), reduced_patterns("SUM", world, 1 + 97 * n, torch.float32, salt=n), n)
    counters = backend().stats()["counters"]
    assert counters["staged_operations"] >= 30 and counters["staged_pending"] == 0
    assert counters["staged_bytes_loaded"] > 0 and counters["staged_bytes_stored"] > 0
    no_violation()


def test_many_staged_operations_are_under_way_and_counted(staged):
    staged(3).run(many_in_flight)


def callbacks() -> None:
    """A callback's own sum: in the order of no thread, and by name on all ranks."""
    _, world = me()
    tensor, again = ones(5), ones(5)

    def then(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        dist.all_reduce(again)
        return future.value()[0].mul_(2).add_(again)

    future = dist.all_reduce(tensor, async_op=True).get_future().then(then)
    check(future.wait().cpu(), torch.full((5,), 3.0 * world), "twice the sum, and the other")
    no_violation()


def test_staged_future_carries_its_result_and_callbacks_issue(staged):
    staged(2).run(callbacks)


def train() -> None:
    rank, world = me()
    torch.manual_seed(1)
    plain = torch.nn.Linear(20, 3, device="cpu")
    model = DDP(torch.nn.Linear(20, 3).to(device()), bucket_cap_mb=0.0001)
    model.module.load_state_dict(plain.state_dict())
    inputs = [torch.randn(4, 20) for _ in range(world)]
    model(inputs[rank].to(device())).square().sum().backward()
    (sum(plain(each).square().sum() for each in inputs) / world).backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), other.grad)
    no_violation()


def test_ddp_averages_gradients_through_host_memory(staged):
    staged(2).run(train)


# ---------------------------------------------------------------- ends


def error_of(work: dist.Work) -> ErrorInfo:
    kept["waits"] = True
    error = failure_of(work.wait)
    kept["waits"] = False
    assert error is not None
    return error


def wait_for_wait() -> None:
    wait_until(lambda: bool(kept.get("waits")), "the main thread's wait")


def queued() -> ErrorInfo:
    hold()
    tensor = ones(1000)
    error = error_of(dist.all_reduce(tensor, async_op=True))
    let_go()
    keep_buffers(tensor)
    return error


def exchanging() -> ErrorInfo:
    tensor = ones(1000)
    before = loaded_bytes()
    work = dist.all_reduce(tensor, async_op=True)
    wait_until(lambda: loaded_bytes() > before, "the copy into host memory")
    error = error_of(work)
    keep_buffers(tensor)
    check(tensor.cpu(), torch.ones(1000), "nothing was stored")
    return error


def loaded() -> ErrorInfo:
    """Behind one whose stream stands still, on a stream of its own."""
    tensors = [ones(1000), ones(1000)]
    torch.accelerator.synchronize()
    hold()
    first = dist.all_reduce(tensors[0], async_op=True)
    before = loaded_bytes()
    with torch.get_device_module(accelerator.NAME).stream(torch.Stream(device=device())):
        second = dist.all_reduce(tensors[1], async_op=True)
        wait_until(lambda: loaded_bytes() > before, "the second one's copy")
    error = error_of(second)
    assert error_of(first).type == error.type
    let_go()
    keep_buffers(*tensors)
    return error


def loaded_bytes() -> int:
    return int(backend().stats()["counters"]["staged_bytes_loaded"])


STATES = (queued, loaded, exchanging)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_abort_ends_a_staged_operation_in_each_state(devices, staged, state):
    world = staged(2)
    world.run(check_sum)
    call = world.start(0, state)
    world.side(0, wait_for_wait)
    world.side(0, abort)
    error = call.value(NOTICE)
    assert error.type == "CommAbortedError" and error.fields["op"] == "allreduce", error.text
    again(devices, world, range(2)).run(check_sum)
    world.on(0, buffers_are_unchanged)
    world.on(0, no_violation)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_death_ends_a_staged_operation_in_each_state(devices, staged, state):
    world = staged(2)
    world.run(check_sum)
    call = world.start(0, state)
    world.side(0, wait_for_wait)
    world.kill(1)
    error = call.value(NOTICE)
    assert error.type == "PeerLostError" and error.cause["rank"] == 1, error.text
    again(devices, world, range(1)).run(check_sum)
    world.on(0, buffers_are_unchanged)


@contextlib.contextmanager
def copies_held() -> Iterator[None]:
    """No copy runs: all streams that torch's pool hands out stand still."""
    with contextlib.ExitStack() as held:
        for _ in range(NORMAL_STREAMS):
            with torch.get_device_module(accelerator.NAME).stream(torch.Stream(device=device())):
                held.enter_context(stalled())
        yield


def abort_beside() -> tuple[threading.Thread, threading.Event]:
    """Abort on another thread; the event says that abort() has returned."""
    returned = threading.Event()

    def run() -> None:
        abort()
        returned.set()

    thread = threading.Thread(target=run)
    thread.start()
    wait_errored()
    return thread, returned


def abort_while_loading() -> None:
    tensor = ones(1000)
    torch.accelerator.synchronize()
    with copies_held():
        note_recorded()
        work = dist.all_reduce(tensor, async_op=True)
        wait_until(lambda: copies_enqueued() > 0, "the copy")
        thread, returned = abort_beside()
        assert not returned.wait(0.3) and not work.is_completed()
    thread.join(NOTICE)
    assert returned.is_set()
    assert error_of(work).type == "CommAbortedError"
    check(tensor.cpu(), torch.ones(1000), "nothing was stored")
    no_violation()


def copies_enqueued() -> int:
    """Events recorded since the last reset: one at issue, one behind each copy; less the first."""
    found = accelerator.simulator().report()["counts"]
    recorded = sum(count for name, count in found.items() if name.startswith("recorded on"))
    return int(recorded) - int(kept["recorded"])


def note_recorded() -> None:
    """Call it before an operation is issued."""
    kept["recorded"] = 0
    kept["recorded"] = copies_enqueued() + 1


@HOLDS_STREAMS
def test_abort_waits_for_copies_that_run_and_stores_nothing_on_the_simulator(devices, staged):
    world = staged(2)
    world.run(check_sum)
    world.on(0, abort_while_loading)
    again(devices, world, range(2)).run(check_sum)


def abort_while_storing() -> None:
    """Rank 1 takes part only once the copies of rank 0 are held."""
    rank, world = me()
    tensor, word = ones(1000), torch.ones(1)
    torch.accelerator.synchronize()
    if rank == 1:
        dist.recv(word, 0)
        dist.all_reduce(tensor)
        return
    before = loaded_bytes()
    note_recorded()
    work = dist.all_reduce(tensor, async_op=True)
    wait_until(lambda: loaded_bytes() > before, "the copy into host memory")
    with copies_held():
        dist.send(word, 1)
        wait_until(lambda: copies_enqueued() > 1, "the copy back")
        thread, returned = abort_beside()
        assert not returned.wait(0.3) and not work.is_completed()
    thread.join(NOTICE)
    assert returned.is_set()
    work.wait()  # it had succeeded but for the copy
    check(tensor.cpu(), torch.full((1000,), float(world)), "the sum")
    no_violation()


@HOLDS_STREAMS
def test_abort_returns_after_the_copy_back_that_had_begun_on_the_simulator(devices, staged):
    world = staged(2)
    world.run(check_sum)
    calls = [world.start(rank, abort_while_storing) for rank in (1, 0)]
    calls[1].value(NOTICE)
    failed, _ = calls[0].outcome()
    del failed  # rank 1 may have had its sum, or the abort
    again(devices, world, range(2)).run(check_sum)


def too_late() -> ErrorInfo:
    backend().set_timeout(seconds(2))
    tensor = ones(10)
    with stalled():
        error = error_of(dist.all_reduce(tensor, async_op=True))
    check(tensor.cpu(), torch.ones(10), "nothing was stored")
    no_violation()
    return error


def test_deadline_ends_a_wait_for_ones_own_stream_and_says_so(devices, staged):
    world = staged(2)
    world.run(check_sum)
    error = world.on(0, too_late)
    assert error.type == "CommTimeoutError", error.text
    assert "enqueued before it on its stream" in error.text, error.text
    again(devices, world, range(2)).run(check_sum)


def mismatched() -> ErrorInfo:
    rank, _ = me()
    return error_of(dist.all_reduce(ones(10 + rank), async_op=True))


def test_staged_operations_that_differ_are_a_mismatch(staged):
    for error in staged(2).run(mismatched):
        assert error.type == "MismatchError", error.text


def leave_at_once() -> int:
    works = [dist.all_reduce(ones(10_000), async_op=True) for _ in range(20)]
    dist.destroy_process_group()
    done = sum(failure_of(work.wait) is None for work in works)
    device_side.leave()
    return done


def test_leaving_waits_for_staged_operations(staged):
    assert staged(2).run(leave_at_once) == [20, 20]


INTERRUPTED = """
import os, signal, threading
import device_side, torch, torch.distributed as dist, torchft_ext

device_side.accelerator.prepare()
options = torchft_ext.Options(staged=True)
dist.init_process_group("ft:host", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
tensor = device_side.ones(3)
with device_side.stalled():
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        dist.all_reduce(tensor)
    except KeyboardInterrupt:
        print("interrupted")
print(torchft_ext.backend().errored().cause.how)
assert tensor.cpu().tolist() == [1.0] * 3
"""


def run_program(text: str, rank_env: dict[str, str]) -> str:
    env = {**device_environment(rank_env), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ctrl_c_ends_a_wait_for_ones_own_stream(rank_env):
    assert "interrupted\na signal interrupted" in run_program(INTERRUPTED, rank_env)


def not_a_number() -> ErrorInfo:
    tensor = ones(10)
    if me()[0] == 1:
        tensor[3] = float("nan")
    return error_of(dist.all_reduce(tensor, async_op=True))


def test_nan_in_a_staged_tensor_fails_the_generation(staged):
    for error in staged(2, nan_check=True).run(not_a_number):
        assert error.type == "CommAbortedError" and error.cause["rank"] == 1, error.text
        assert "nan_check found NaN in its input of the allreduce" in error.text, error.text


# ---------------------------------------------------------------- refusals and names


def captured() -> ErrorInfo:
    tensor = ones(3)
    check_sum()
    graph = accelerator.Graph()
    with graph.capture("thread_local"):
        error = failure_of(lambda: dist.all_reduce(tensor))
    assert error is not None
    graph.free()
    check_sum()
    no_violation()
    return error


def test_capture_of_a_graph_is_refused(staged):
    for error in staged(1).run(captured):
        assert error.type == "NotImplementedError", error.text
        assert "allreduce: expected no capture of a graph" in error.text, error.text


def refused(name: str, address: str) -> ErrorInfo:
    device_side.accelerator.prepare()
    device_side.leave()
    store = device_side.rankside.connected_store(address)
    options = torchft_ext.Options(staged=True)
    error = failure_of(
        lambda: dist.init_process_group(name, store=store, rank=0, world_size=1, pg_options=options)
    )
    assert error is not None
    return error


@pytest.mark.parametrize("name", ("ft", "ft:nccl"))
def test_option_is_refused_for_other_engines(devices, name):
    (worker,) = devices.pool.borrow(1)
    error = worker.call(refused, (name, devices.pool.address()), {}).value()
    assert error.type == "ValueError", error.text
    assert "Options.staged: expected it with the backend 'ft:host'" in error.text
    assert f"found '{name}'" in error.text


def two_of_ours(address: str, rank: int) -> ErrorInfo:
    device_side.init(f"cpu:ft_host,{accelerator.NAME}:ft_host", address, rank, 2)
    torch_error = failure_of(lambda: dist.all_reduce(ones(3)))
    assert torch_error is not None
    return torch_error


def test_spec_without_the_option_says_what_to_do(devices):
    pool = devices.pool
    address, workers = pool.address(), pool.borrow(2)
    calls = [worker.call(two_of_ours, (address, rank), {}) for rank, worker in enumerate(workers)]
    for call in calls:
        error = call.value()
        assert error.type == "NotImplementedError", error.text
        assert "this group serves CPU tensors only" in error.text
        assert "Options(staged=True)" in error.text


def in_gloos_place(address: str, rank: int, spec: str) -> tuple[str, float]:
    with torchft_ext.replace_gloo():
        device_side.init(spec, address, rank, 2)
    tensor = ones(3)
    dist.all_reduce(tensor)
    on_host = torch.ones(3)
    dist.all_reduce(on_host)
    assert len(torchft_ext.backends_of()) == 1
    no_violation()
    return dist.get_backend(), tensor[0].item() + on_host[0].item()


@pytest.mark.parametrize("spec", ("gloo", f"cpu:gloo,{accelerator.NAME}:gloo"))
def test_group_in_gloos_place_takes_device_tensors(devices, spec):
    pool = devices.pool
    address, workers = pool.address(), pool.borrow(2)
    calls = [
        worker.call(in_gloos_place, (address, rank, spec), {})
        for rank, worker in enumerate(workers)
    ]
    assert [call.value() for call in calls] == [(spec, 4.0)] * 2


# ---------------------------------------------------------------- what stays


def what_there_is() -> tuple[list[str], int]:
    torch.accelerator.synchronize()
    return [t for t in backend().stats()["threads"] if t == "ft-staging"], (
        accelerator.tensor_bytes()
    )


def test_thirty_generations_leave_one_thread_and_no_memory(devices, staged):
    world = staged(2)
    world.run(check_sum)
    before = world.run(what_there_is)
    for _ in range(30):
        world = again(devices, world, range(2))
        world.run(check_sum)
    assert world.run(what_there_is) == before
    assert all(threads == ["ft-staging"] for threads, _ in before)
