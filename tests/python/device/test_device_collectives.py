"""Operations on device tensors give what the CPU engine gives."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import test_collectives
import test_layouts
import torch
import torch.distributed as dist
import values
from device_side import (
    accelerator,
    check_sum,
    device,
    hold,
    let_go,
    no_violation,
    ones,
    stalled,
    stream_of_its_own,
)
from rankside import backend, seconds, wait_until
from values import check, me, pattern, reduced_patterns

WORLDS = (1, 2, 3, 4)
TABLE = [operation.__name__ for operation in test_collectives.OPERATIONS]


def allowed_on_device(op: str, dtype: torch.dtype) -> bool:
    """NCCL has neither 16 bit integers nor bitwise reductions; flags are reduced as bytes."""
    if op in values.BITWISE and dtype != torch.bool:
        return False
    return values.allowed(op, dtype) and dtype != torch.int16


def run_table(name: str) -> None:
    """A function of the CPU's table, with every tensor made on the device."""
    test_collectives.allowed = allowed_on_device
    if accelerator.shared_by(me()[1]):  # a small operation takes milliseconds there
        test_collectives.SIZES, test_collectives.LARGE = (0, 1025), 131_101
    with torch.device(device()):
        getattr(test_collectives, name)()
    backend().check()
    no_violation()


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("name", TABLE)
def test_device_collective_gives_the_reference_result(devices, name, size):
    devices.world(size).run(run_table, name)


def run_layouts(name: str) -> None:
    rank, _ = me()
    with torch.device(device()):
        for shift in range(len(test_layouts.LAYOUTS)):
            getattr(test_layouts, name)(test_layouts.Layouts(rank, shift))
    backend().check()
    no_violation()


@pytest.mark.parametrize("name", ("reductions", "copies", "exchanges"))
def test_device_results_are_by_element_whatever_the_layouts(devices, name):
    devices.world(2).run(run_layouts, name)


CHAINS = [chain.name for chain in test_layouts.CHAINED if chain.name != "block"]


def run_chained(name: str) -> None:
    with torch.device(device()):
        if name == "inputs":
            test_layouts.inputs_in_turn()
        else:
            test_layouts.chained(name)
    backend().check()
    no_violation()


# NCCL leaves the order within a block open.
@pytest.mark.parametrize("name", [*CHAINS, "inputs"])
def test_device_tensor_of_any_layout_is_read_when_its_turn_has_come(devices, name):
    devices.world(3).run(run_chained, name)


def keep_works_of_strided_tensors() -> None:
    tensor = ones(1000, 1000).t()
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    before = accelerator.tensor_bytes()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(10)]
    for work in works:
        work.wait()
    torch.accelerator.synchronize()
    backend().check()
    wait_until(lambda: accelerator.tensor_bytes() <= before, "what the operations needed to go")
    del works
    no_violation()


def test_kept_works_keep_no_memory(devices):
    devices.world(2).run(keep_works_of_strided_tensors)


OTHERS = ("special_values", "many_in_flight", "futures_carry_results", "barrier_orders")


@pytest.mark.parametrize("name", OTHERS)
def test_device_operation_behaves_as_the_cpus(devices, name):
    devices.world(3).run(run_other, name)


def run_other(name: str) -> None:
    if name == "many_in_flight":
        return many_in_flight()
    run_table(name)


def many_in_flight() -> None:
    rank, world = me()
    tensors = [pattern(rank, 1 + 97 * n, torch.float32, salt=n).to(device()) for n in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    works[-1].check()
    assert works[-1].is_completed()
    for n, tensor in enumerate(tensors):
        expected = reduced_patterns("SUM", world, 1 + 97 * n, torch.float32, salt=n)
        check(tensor.cpu(), expected, n)
    no_violation()


def bools() -> None:
    rank, world = me()
    for op, expected in (
        ("BAND", [False, False, True]),
        ("BOR", [False, True, True]),
        ("BXOR", [False, True, world % 2 == 1]),
        ("SUM", [False, True, True]),
        ("PRODUCT", [False, False, True]),
    ):
        tensor = torch.tensor([False, rank == 1, True], device=device())
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        check(tensor.cpu(), torch.tensor(expected), op)
    no_violation()


@pytest.mark.parametrize("size", (2, 3))
def test_bools_are_reduced_by_every_bitwise_operation(devices, size):
    devices.world(size).run(bools)


def wide_types() -> None:
    rank, world = me()
    tensor = torch.complex(torch.arange(5.0) + rank, torch.ones(5)).to(device())
    dist.all_reduce(tensor)
    real = torch.arange(5.0) * world + world * (world - 1) / 2
    check(tensor.cpu(), torch.complex(real, torch.full((5,), float(world))), "complex")
    bits = [torch.full((24,), source + 1, dtype=torch.uint8) for source in range(world)]
    for dtype in (torch.complex64, torch.int16, torch.bool, torch.float8_e5m2):
        own = torch.zeros(24, dtype=torch.uint8) + (1 if dtype == torch.bool else bits[rank])
        outputs = [torch.zeros(24, dtype=torch.uint8).view(dtype).to(device()) for _ in bits]
        dist.group.WORLD.allgather([outputs], [own.view(dtype).to(device())]).wait()
        for source, output in enumerate(outputs):
            expected = torch.ones(24, dtype=torch.uint8) if dtype == torch.bool else bits[source]
            check(output.cpu().view(torch.uint8), expected, (dtype, source))
    no_violation()


def test_complex_numbers_are_summed_and_any_dtype_is_moved(devices):
    devices.world(3).run(wide_types)


def factor_in_stream_order() -> None:
    """It is read on the device, behind what the caller has enqueued before; the host waits not."""
    check_sum()  # what NCCL makes at first is not made behind a stream that is held back
    rank, world = me()
    tensor, factor = ones(1000), ones(1)
    with stalled():
        factor.mul_(rank + 2)
        work = dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor), async_op=True)
        assert not work.is_completed()
    del factor
    ones(1, value=9)  # in the factor's memory, were it free
    work.check()
    check(tensor.cpu(), torch.full((1000,), world * (world + 3) / 2), "the products' sum")
    with pytest.raises(ValueError, match="expected it on the CPU or on cpu"):
        dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(ones(1)))
    no_violation()


def test_factor_on_the_device_is_read_in_stream_order(devices):
    devices.world(2).run(factor_in_stream_order)


def factor_in_a_graph() -> None:
    _, world = me()
    tensor, factor = ones(5), ones(1, value=2)
    check_sum()
    graph = accelerator.Graph()
    with graph.capture():
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
    factor.fill_(3)
    graph.replay()
    torch.accelerator.synchronize()
    check(tensor.cpu(), torch.full((5,), 3.0 * world), "the factor of the moment")
    graph.free()
    no_violation()


def test_captured_sum_reads_its_factor_at_each_replay(devices):
    devices.world(2).run(factor_in_a_graph)


# Of these NCCL's kernel for a world of one (2.19 to 2.29.3) leaves out the last elements.
ONE_RANK_SIZES = {
    torch.float32: 70_001,
    torch.float64: 70_405,
    torch.float16: 281_607,
    torch.bfloat16: 281_607,
}


def every_element(dtype: torch.dtype) -> None:
    """Every operation that multiplies, also as part of a group and of a graph."""
    size, op = ONE_RANK_SIZES[dtype], dist._make_nccl_premul_sum(0.5)
    given, halved = ones(size).to(dtype), torch.full((size,), 0.5, dtype=dtype)
    summed, scattered = given.clone(), torch.zeros_like(given)
    dist.all_reduce(summed, op)
    check(summed.cpu(), halved, "all_reduce")
    summed = given.clone()
    dist.reduce(summed, 0, op)
    check(summed.cpu(), halved, "reduce")
    dist.reduce_scatter(scattered, [given], op)
    check(scattered.cpu(), halved, "reduce_scatter")
    grouped, also = given.clone(), torch.zeros_like(given)
    with dist._coalescing_manager(device=device()):
        dist.all_reduce(grouped, op)
    with dist._coalescing_manager(device=device()):
        dist.reduce_scatter_tensor(also, given, op)
    check(grouped.cpu(), halved, "all_reduce in a group")
    check(also.cpu(), halved, "reduce_scatter_tensor in a group")
    captured, graph = given.clone(), accelerator.Graph()
    torch.accelerator.synchronize()
    with graph.capture():
        dist.all_reduce(captured, op)
    graph.replay()
    torch.accelerator.synchronize()
    check(captured.cpu(), halved, "all_reduce in a graph")
    graph.free()
    no_violation()


@pytest.mark.parametrize("dtype", ONE_RANK_SIZES)
def test_a_world_of_one_multiplies_every_element(devices, dtype):
    devices.world(1).run(every_element, dtype)


def small_floats() -> None:
    _, world = me()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = torch.full((16,), 0.5).to(dtype).to(device())
        dist.all_reduce(tensor)
        check(tensor.cpu().float(), torch.full((16,), 0.5 * world), dtype)
    no_violation()


def test_float8_is_summed(devices):
    devices.world(2).run(small_floats)  # a GPU needs compute capability 9 for it


# Of normal priority, handed out in turn. A real device has too many to hold up all of them.
NORMAL_STREAMS = 8 if accelerator.simulated() else 0


def beside_stalled_streams() -> None:
    """All streams of normal priority are held up, so only one of high priority gets anywhere."""
    rank, world = me()
    check_sum()
    tensor = ones(33, value=rank + 1.0)
    torch.accelerator.synchronize()
    module = torch.get_device_module(accelerator.NAME)
    with contextlib.ExitStack() as held:
        for _ in range(NORMAL_STREAMS):
            with module.stream(torch.Stream(device=device())):
                held.enter_context(stalled())
        work = dist.all_reduce(tensor, async_op=True)
        wait_until(work.is_completed, "the sum on a stream of its own")
        work.wait()
        check(tensor.cpu(), torch.full((33,), world * (world + 1) / 2), "the sum")
    no_violation()


def test_streams_of_high_priority_serve_a_generation(devices):
    devices.world(2, high_priority_stream=True).run(beside_stalled_streams)


def on_the_current_stream() -> None:
    _, world = me()
    stream = torch.Stream(device=device())
    tensor = ones(1000)
    torch.accelerator.synchronize()
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        tensor.mul_(3)
        dist.all_reduce(tensor)  # behind the product, before the next one, no wait in between
        tensor.mul_(2)
        check(tensor.cpu(), torch.full((1000,), 6.0 * world), "in stream order")
    finally:
        torch.accelerator.set_stream(before)
    no_violation()


def test_synchronous_operation_runs_in_the_order_of_the_current_stream(devices):
    devices.world(2).run(on_the_current_stream)


def on_several_streams() -> None:
    """As FSDP2 does: gathers on one stream, reductions on another, nothing between the two."""
    _, world = me()
    streams = [torch.Stream(device=device()) for _ in range(2)]
    tensors = [ones(5 + n) for n in range(20)]
    torch.accelerator.synchronize()
    for n, tensor in enumerate(tensors):
        with torch.get_device_module(accelerator.NAME).stream(streams[n % 2]):
            dist.all_reduce(tensor)
    backend().check()
    torch.accelerator.synchronize()
    for n, tensor in enumerate(tensors):
        check(tensor.cpu(), torch.full((5 + n,), float(world)), n)
    no_violation()


def test_operations_on_several_streams_keep_the_order_of_issue(devices):
    devices.world(3).run(on_several_streams)


def wait_does_not_block() -> None:
    check_sum()
    _, world = me()
    tensor = ones(10)
    with stalled():  # nothing on the current stream moves
        work = dist.all_reduce(tensor, async_op=True)
        assert work.wait()
        future = work.get_future()
        assert future.done() and not work.is_completed()
    tensor.add_(1)
    work.check()
    assert work.is_completed() and work.is_success()
    check(future.value()[0].cpu(), torch.full((10,), world + 1.0), "after the stream moved")
    no_violation()


def test_wait_blocks_the_stream_and_not_the_host(devices):
    devices.world(2).run(wait_does_not_block)


def durations() -> None:
    check_sum()
    dist.group.WORLD._enable_collectives_timing()
    began = time.monotonic()
    with stalled():
        work = dist.all_reduce(ones(10), async_op=True)
        with pytest.raises(RuntimeError, match="has not completed"):
            work._get_duration()
    work.check()
    assert 0 < work._get_duration() <= (time.monotonic() - began) * 1000
    no_violation()


def test_duration_is_told_when_timing_is_on(devices):
    devices.world(2).run(durations)


def duration_of_a_captured_one() -> str:
    dist.group.WORLD._enable_collectives_timing()
    check_sum()
    tensor, graph = ones(3), accelerator.Graph()
    torch.accelerator.synchronize()
    with graph.capture():
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
    with pytest.raises(RuntimeError) as caught:
        work._get_duration()
    graph.free()
    no_violation()
    return str(caught.value)


def test_duration_of_a_captured_operation_is_refused(devices):
    for text in devices.world(2).run(duration_of_a_captured_one):
        assert "captured into a graph" in text and "replay()" in text


def hook_on_the_device() -> int:
    group, told = dist.group.WORLD, []
    check_sum()
    group._register_on_completion_hook(told.append)
    with stalled():
        work = dist.all_reduce(ones(100), async_op=True)
        work.wait()
        assert not told
    group._wait_for_pending_works()
    assert work.is_completed() and len(told) == 1
    assert told[0].active_duration >= seconds(0)
    tensor, graph = ones(3), accelerator.Graph()
    torch.accelerator.synchronize()
    with graph.capture():
        dist.all_reduce(tensor)
    group._wait_for_pending_works()
    graph.free()
    assert len(told) == 1
    check_sum()
    group._wait_for_pending_works()
    no_violation()
    return len(told)


def test_hook_is_told_of_device_operations_when_their_stream_is_past_them(devices):
    workers = devices.pool.borrow(2)
    world = devices.made_by_init("ft", devices.pool.address(), workers)
    assert world.run(hook_on_the_device) == [2, 2]


def coalesced() -> None:
    rank, world = me()
    many = [ones(5, value=rank + n) for n in range(3)]
    with dist._coalescing_manager(device=device(), async_ops=True) as manager:
        for tensor in many:
            dist.all_reduce(tensor)
    manager.wait()
    for n, tensor in enumerate(many):
        expected = float(sum(source + n for source in range(world)))
        check(tensor.cpu(), torch.full((5,), expected), n)
    roots = [ones(3, value=rank) for _ in range(world)]
    with dist._coalescing_manager(device=device()):
        for root, tensor in enumerate(roots):
            dist.broadcast(tensor, root)
    for root, tensor in enumerate(roots):
        check(tensor.cpu(), torch.full((3,), float(root)), root)
    backend().check()
    no_violation()


def test_coalesced_operations_begin_as_one(devices):
    devices.world(3).run(coalesced)


def coalesced_on_two_streams() -> None:
    rank, _ = me()
    check_sum()
    tensor, other = ones(5, value=rank), stream_of_its_own()
    torch.accelerator.synchronize()
    stream_of = torch.get_device_module(accelerator.NAME).stream
    with dist._coalescing_manager(device=device(), async_ops=True) as manager:
        with stream_of(other):
            hold()
            tensor.add_(10)
            dist.broadcast(tensor, 0, async_op=True)
    threading.Timer(0.2, let_go).start()
    manager.wait()
    check(tensor.cpu(), torch.full((5,), 10.0), "behind what that stream had to do first")
    no_violation()


def test_coalesced_operations_come_behind_the_streams_they_were_called_on(devices):
    devices.world(2).run(coalesced_on_two_streams)


def coalesced_here_and_there() -> str:
    check_sum()
    works: list[dist.Work] = []
    with pytest.raises(ValueError, match="issue it outside of the block") as caught:
        with dist._coalescing_manager(device=device(), async_ops=True):
            works.append(dist.group.WORLD.broadcast(torch.ones(3), 0))
            dist.barrier(async_op=True, device_ids=[device().index])
    for _ in range(2):
        with pytest.raises(ValueError, match="issue it outside of the block"):
            works[0].wait()
    assert works[0].is_completed() and not works[0].is_success()
    check_sum()
    no_violation()
    return str(caught.value)


def test_a_block_of_the_host_and_of_a_device_is_refused(devices):
    for text in devices.world(2).run(coalesced_here_and_there):
        assert "coalesced block" in text and "a barrier on" in text


def exchange_with_everyone() -> None:
    rank, world = me()
    received = {peer: ones(7, value=-1) for peer in range(world) if peer != rank}
    batch = []
    for peer, tensor in received.items():
        batch.append(dist.P2POp(dist.isend, ones(7, value=10 * rank + peer), peer))
        batch.append(dist.P2POp(dist.irecv, tensor, peer))
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    for peer, tensor in received.items():
        check(tensor.cpu(), torch.full((7,), 10.0 * peer + rank), peer)
    backend().check()
    no_violation()


@pytest.mark.parametrize("size", (2, 4))
def test_batch_of_sends_and_receives_with_everyone_completes(devices, size):
    devices.world(size).run(exchange_with_everyone)


def send_and_receive() -> None:
    rank, _ = me()
    for source in (0, 1):
        tensor = ones(9, value=rank)
        if rank == source:
            dist.send(tensor, 1 - rank)
        else:
            dist.recv(tensor, source)
            check(tensor.cpu(), torch.full((9,), float(source)), source)
    backend().check()
    no_violation()


def test_send_and_recv_deliver(devices):
    devices.world(2).run(send_and_receive)


def both_kinds() -> None:
    rank, world = me()
    host, other = torch.full((5,), rank + 1.0), ones(5, value=rank + 1)
    works = [dist.all_reduce(host, async_op=True), dist.all_reduce(other, async_op=True)]
    for work in works:
        work.wait()
    expected = torch.full((5,), world * (world + 1) / 2)
    check(host, expected, "host")
    check(other.cpu(), expected, "device")
    dist.barrier()  # on the device that the group has used
    no_violation()


def test_one_group_serves_host_and_device_tensors(devices):
    devices.world(2).run(both_kinds)


def refused() -> dict[str, str]:
    def text(action) -> str:
        try:
            action()
        except (ValueError, TypeError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("it was not refused")

    group, world = dist.group.WORLD, me()[1]
    texts = {
        "int16": text(lambda: dist.all_reduce(torch.ones(3, dtype=torch.int16, device=device()))),
        "complex": text(
            lambda: dist.all_reduce(ones(3).to(torch.complex64), dist.ReduceOp.PRODUCT)
        ),
        "band": text(lambda: dist.all_reduce(ones(3), dist.ReduceOp.BAND)),
        "mixed": text(lambda: group.allgather([[torch.ones(3)] * world], [ones(3)]).wait()),
        "expanded": text(lambda: dist.all_reduce(ones(4, 1).expand(4, 4))),
        "anyone": text(lambda: backend().recv_anysource([ones(3)], 0)),
    }
    assert backend().errored() is None
    check_sum()
    return texts


def test_bad_device_arguments_are_refused_and_the_generation_goes_on(devices):
    for texts in devices.world(2).run(refused):
        assert "int16" in texts["int16"] or "Short" in texts["int16"]
        assert "memory for each element" in texts["expanded"]
        assert "found" in texts["band"] and "one device" in texts["mixed"]
        assert "NotImplementedError" in texts["anyone"] and "source rank" in texts["anyone"]


def refuse_host_tensors() -> str:
    with pytest.raises(NotImplementedError) as caught:
        backend().allreduce([torch.ones(3)])
    check_sum()
    dist.barrier()
    return str(caught.value)


def test_group_for_device_tensors_refuses_the_cpus(devices):
    for text in devices.world(2, name="ft:nccl").run(refuse_host_tensors):
        assert "'ft'" in text and "CPU" in text


def refuse_device_tensors() -> str:
    with pytest.raises(NotImplementedError) as caught:
        backend().allreduce([ones(3)])
    assert backend().errored() is None
    values.check_sum()
    return str(caught.value)


def test_group_for_host_tensors_refuses_the_devices_and_says_what_serves_both(devices):
    for text in devices.world(2, name="ft:host").run(refuse_device_tensors):
        assert "allreduce: tensors: this group serves CPU tensors only" in text, text
        assert f"found tensors on {accelerator.NAME}:" in text, text
        assert "use the backend 'ft', which serves both" in text, text


def check_waits() -> list[bool]:
    work = dist.all_reduce(ones(10), async_op=True)
    backend().check()
    return [work.is_completed(), work.is_success()]


def test_check_returns_when_everything_is_complete(devices):
    assert devices.world(2).run(check_waits) == [[True, True]] * 2
