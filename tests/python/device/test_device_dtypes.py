"""Types of device tensors: what is reduced, what is only moved, and factors of sums."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_side import accelerator, check_sum, device, no_violation, ones, stalled
from values import check, me


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
