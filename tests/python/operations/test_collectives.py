"""Every collective gives what the reference gives, for every world, dtype, reduction and size."""

from __future__ import annotations

import itertools
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from rankside import backend, wait_until
from values import (
    DTYPES,
    FLOATS,
    LARGE,
    REDUCTIONS,
    SIZES,
    allowed,
    check,
    digest,
    me,
    noise,
    pattern,
    reduced_patterns,
)

WORLDS = (1, 2, 3, 4, 5)


def reduce_op(name: str) -> dist.ReduceOp:
    return getattr(dist.ReduceOp, name)


def all_reduce() -> None:
    rank, world = me()
    for dtype, op, size in itertools.product(DTYPES, REDUCTIONS, SIZES):
        if allowed(op, dtype):
            tensor = pattern(rank, size, dtype)
            dist.all_reduce(tensor, reduce_op(op))
            expected = reduced_patterns(op, world, size, dtype)
            check(tensor, expected, (dtype, op, size), exact=op != "AVG")


def all_reduce_large() -> None:
    rank, world = me()
    for dtype, op in ((torch.float32, "SUM"), (torch.bfloat16, "MAX"), (torch.int8, "SUM")):
        tensor = pattern(rank, LARGE, dtype)
        dist.all_reduce(tensor, reduce_op(op))
        check(tensor, reduced_patterns(op, world, LARGE, dtype), (dtype, op))


def broadcast() -> None:
    rank, world = me()
    for root, dtype, size in itertools.product(range(world), DTYPES, SIZES):
        tensor = pattern(rank, size, dtype)
        dist.broadcast(tensor, root)
        check(tensor, pattern(root, size, dtype), (root, dtype, size))
    tensor = pattern(rank, LARGE, torch.float32)
    dist.broadcast(tensor, world - 1)
    check(tensor, pattern(world - 1, LARGE, torch.float32), "large")


def reduce() -> None:
    rank, world = me()
    whole = (torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
    cases = itertools.product(range(world), (*FLOATS, *whole), REDUCTIONS, SIZES)
    for root, dtype, op, size in cases:
        if not allowed(op, dtype):
            continue
        tensor = pattern(rank, size, dtype)
        dist.reduce(tensor, root, reduce_op(op))
        if rank == root:
            expected = reduced_patterns(op, world, size, dtype)
            check(tensor, expected, (root, dtype, op, size), exact=op != "AVG")
    tensor = pattern(rank, LARGE, torch.int32)
    dist.reduce(tensor, world - 1)
    if rank == world - 1:
        check(tensor, reduced_patterns("SUM", world, LARGE, torch.int32), "large")


def all_gather() -> None:
    rank, world = me()
    for dtype, size in (*itertools.product(DTYPES, SIZES), (torch.float32, LARGE)):
        outputs = [torch.zeros(size, dtype=dtype) for _ in range(world)]
        dist.all_gather(outputs, pattern(rank, size, dtype))
        for source, output in enumerate(outputs):
            check(output, pattern(source, size, dtype), (source, dtype, size))


def all_gather_of_different_sizes() -> None:
    rank, world = me()
    for unit in (1, 7, 70_001):
        sizes = [unit * ((source + 1) % 3) for source in range(world)]  # some are empty
        outputs = [torch.full((size,), -9.0) for size in sizes]
        dist.all_gather(outputs, pattern(rank, sizes[rank], torch.float32))
        for source, output in enumerate(outputs):
            check(output, pattern(source, sizes[source], torch.float32), (unit, source))


def all_gather_into_tensor() -> None:
    rank, world = me()
    for dtype, size in (*itertools.product(DTYPES, SIZES), (torch.float32, LARGE)):
        output = torch.zeros(size * world, dtype=dtype)
        dist.all_gather_into_tensor(output, pattern(rank, size, dtype))
        expected = torch.cat([pattern(source, size, dtype) for source in range(world)])
        check(output, expected, (dtype, size))


def gather_and_scatter() -> None:
    rank, world = me()
    for root, dtype, size in itertools.product(range(world), DTYPES, SIZES):
        outputs = None
        if rank == root:
            outputs = [torch.zeros(size, dtype=dtype) for _ in range(world)]
        dist.gather(pattern(rank, size, dtype), outputs, root)
        for source, output in enumerate(outputs or []):
            check(output, pattern(source, size, dtype), ("gather", root, source, dtype, size))
        inputs = None
        if rank == root:
            inputs = [pattern(target, size, dtype, salt=1) for target in range(world)]
        output = torch.zeros(size, dtype=dtype)
        dist.scatter(output, inputs, root)
        check(output, pattern(rank, size, dtype, salt=1), ("scatter", root, dtype, size))


def reduce_scatter() -> None:
    rank, world = me()
    for dtype, op, size in itertools.product(DTYPES, REDUCTIONS, SIZES):
        if not allowed(op, dtype):
            continue
        expected = reduced_patterns(op, world, size, dtype, salt=rank)
        inputs = [pattern(rank, size, dtype, salt=target) for target in range(world)]
        for whole in (False, True):
            output = torch.zeros(size, dtype=dtype)
            if whole:
                dist.reduce_scatter_tensor(output, torch.cat(inputs), reduce_op(op))
            else:
                dist.reduce_scatter(output, inputs, reduce_op(op))
            check(output, expected, (whole, dtype, op, size), exact=op != "AVG")


def reduce_scatter_of_different_sizes() -> None:
    rank, world = me()
    for unit in (1, 7, 70_001):
        sizes = [unit * ((target + 1) % 3) for target in range(world)]  # some are empty
        inputs = [pattern(rank, sizes[to], torch.float32, salt=to) for to in range(world)]
        output = torch.full((sizes[rank],), -9.0)
        dist.reduce_scatter(output, inputs)
        expected = reduced_patterns("SUM", world, sizes[rank], torch.float32, salt=rank)
        check(output, expected, unit)


def factor_of(rank: int) -> float:
    return (rank + 1) * 0.5


def premultiplied(rank: int, size: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    return pattern(rank, size, dtype, salt) * factor_of(rank)


def premultiplied_sums() -> None:
    """Each rank's own factor multiplies its own contribution."""
    rank, world = me()
    # A number, an element of the tensors' device, one of another dtype, a tensor of one element.
    for n, (dtype, size) in enumerate(itertools.product(FLOATS, (*SIZES, 70_001))):
        made = torch.float32 if n % 2 else dtype
        given = (factor_of(rank), torch.tensor(factor_of(rank), dtype=made))[n % 3 > 0]
        op = dist._make_nccl_premul_sum(given)
        whole = sum(premultiplied(source, size, dtype) for source in range(world))
        tensor = pattern(rank, size, dtype)
        dist.all_reduce(tensor, op)
        check(tensor, whole, ("all_reduce", dtype, size))
        tensor = pattern(rank, size, dtype)
        dist.reduce(tensor, world - 1, op)
        kept = whole if rank == world - 1 else pattern(rank, size, dtype)
        check(tensor, kept, ("reduce", dtype, size))
        inputs = [pattern(rank, size, dtype, salt=target) for target in range(world)]
        part = sum(premultiplied(source, size, dtype, salt=rank) for source in range(world))
        for flat in (False, True):
            output = torch.zeros(size, dtype=dtype)
            if flat:
                dist.reduce_scatter_tensor(output, torch.cat(inputs), op)
            else:
                dist.reduce_scatter(output, inputs, op)
            check(output, part, ("reduce_scatter", flat, dtype, size))
        for target, tensor in enumerate(inputs):
            check(tensor, pattern(rank, size, dtype, salt=target), "an input was written")
    tensor = torch.complex(torch.ones(3), torch.full((3,), 2.0))
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    check(tensor, torch.complex(torch.ones(3), torch.full((3,), 2.0)) * (world / 2), "complex")


def all_to_all() -> None:
    rank, world = me()
    for dtype, size in (*itertools.product(DTYPES, SIZES), (torch.float32, LARGE // 4)):
        inputs = [pattern(rank, size, dtype, salt=target) for target in range(world)]
        outputs = [torch.zeros(size, dtype=dtype) for _ in range(world)]
        dist.all_to_all(outputs, inputs)
        expected = [pattern(source, size, dtype, salt=rank) for source in range(world)]
        for source, output in enumerate(outputs):
            check(output, expected[source], ("list", source, dtype, size))
        output = torch.zeros(size * world, dtype=dtype)
        dist.all_to_all_single(output, torch.cat(inputs))
        check(output, torch.cat(expected), ("single", dtype, size))


def all_to_all_of_different_sizes() -> None:
    rank, world = me()
    sent = [(rank + 2 * target) % 4 for target in range(world)]  # rows; some are none
    received = [(source + 2 * rank) % 4 for source in range(world)]
    inputs = [pattern(rank, rows * 3, torch.int64, target) for target, rows in enumerate(sent)]
    expected = [
        pattern(source, rows * 3, torch.int64, rank) for source, rows in enumerate(received)
    ]
    outputs = [torch.zeros(rows * 3, dtype=torch.int64) for rows in received]
    dist.all_to_all(outputs, inputs)
    for source, output in enumerate(outputs):
        check(output, expected[source], ("list", source))
    output = torch.zeros(sum(received), 3, dtype=torch.int64)
    whole = torch.cat(inputs).view(-1, 3)
    dist.all_to_all_single(output, whole, output_split_sizes=received, input_split_sizes=sent)
    check(output, torch.cat(expected).view(-1, 3), "single")


OPERATIONS = (
    all_reduce,
    all_reduce_large,
    broadcast,
    reduce,
    all_gather,
    all_gather_of_different_sizes,
    all_gather_into_tensor,
    gather_and_scatter,
    reduce_scatter,
    reduce_scatter_of_different_sizes,
    premultiplied_sums,
    all_to_all,
    all_to_all_of_different_sizes,
)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_collective_gives_the_reference_result(ranks, operation, size):
    ranks.world(size).run(operation)


def rounded(op: str) -> list[str]:
    """Digests of reductions in which the order of the terms, or factors, shows."""
    rank, _ = me()
    digests = []
    for dtype, size in itertools.product(FLOATS, (1, 100, 20_011, 300_007)):
        tensor = noise(rank, size, dtype) / 3  # so that all bits are in use
        if op == "PRODUCT":
            tensor = tensor / 100 + 1  # so that no product overflows
        dist.all_reduce(tensor, reduce_op(op))
        assert bool(tensor.isfinite().all())
        digests.append(digest(tensor))
    return digests


@pytest.mark.parametrize("size", WORLDS[1:])
def test_allreduce_result_is_bit_identical_on_all_ranks(ranks, size):
    world = ranks.world(size)
    for op in ("SUM", "AVG", "PRODUCT"):
        results = world.run(rounded, op)
        assert all(result == results[0] for result in results), op


def rounded_sums_are_close() -> None:
    rank, world = me()
    tensor = noise(rank, 300_007)
    dist.all_reduce(tensor)
    expected = sum(noise(source, 300_007).double() for source in range(world))
    torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-3)


def test_allreduce_of_noise_is_the_sum_up_to_rounding(ranks):
    ranks.world(4).run(rounded_sums_are_close)


def special_values() -> None:
    rank, world = me()
    inf, nan = float("inf"), float("nan")
    tensor = torch.tensor([inf, -inf if rank else inf, nan if rank == 0 else 1.0, -0.0])
    dist.all_reduce(tensor)
    assert tensor[0] == inf and tensor[1:3].isnan().all() and tensor[3] == 0, tensor
    largest = torch.tensor([inf if rank == world - 1 else 0.0, float(rank)])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    check(largest, torch.tensor([inf, world - 1.0]), "max")


def test_allreduce_keeps_infinities_and_nans(ranks):
    ranks.world(3).run(special_values)


def rounded_factors() -> None:
    for dtype in FLOATS:
        tensor = torch.ones(5, dtype=dtype)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(1 / 3))
        check(tensor, torch.full((5,), 1 / 3, dtype=dtype) * 2, dtype)


def test_factor_is_rounded_to_the_tensors_dtype(ranks):
    ranks.world(2).run(rounded_factors)


def in_order_of_issue() -> None:
    rank, world = me()
    tensor = torch.full((70_001,), rank + 1.0)
    works = [dist.all_reduce(tensor, async_op=True)]
    works.append(dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0), async_op=True))
    for work in works:
        work.wait()
    check(tensor, torch.full_like(tensor, world * (world + 1) * world), "the sum of the sums")


def test_contribution_is_multiplied_when_its_turn_has_come(ranks):
    ranks.world(3).run(in_order_of_issue)


def many_in_flight() -> None:
    rank, world = me()
    tensors = [pattern(rank, 1 + 997 * n, torch.float32, salt=n) for n in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    gathered = [torch.zeros(3) for _ in range(world)]
    works.append(dist.all_gather(gathered, torch.full((3,), float(rank)), async_op=True))
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    for n, tensor in enumerate(tensors):
        expected = reduced_patterns("SUM", world, 1 + 997 * n, torch.float32, salt=n)
        check(tensor, expected, n)
    check(torch.stack(gathered)[:, 0], torch.arange(float(world)), "the gather among them")


@pytest.mark.parametrize("size", WORLDS)
def test_many_async_operations_in_flight_all_complete(ranks, size):
    ranks.world(size).run(many_in_flight)


def futures_carry_results() -> None:
    rank, world = me()
    tensor = pattern(rank, 11, torch.float32)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    expected = reduced_patterns("SUM", world, 11, torch.float32)
    check(doubled.wait(), expected * 2, "then()")
    assert work.wait()
    check(work.result()[0] if isinstance(work.result(), list) else tensor, expected, "result")


def test_future_of_an_allreduce_holds_its_tensor_and_runs_callbacks(ranks):
    ranks.world(3).run(futures_carry_results)


def futures_are_complete_after_wait() -> None:
    _, world = me()
    complete = 0
    for _ in range(300):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        future = work.get_future()
        work.wait()
        complete += future.done()
        check(future.wait()[0], torch.full((3,), float(world)), "the value after wait()")
    # wait() gives a callback a millisecond, and the one that completes the future may be off its
    # core for longer, now and then.
    assert complete >= 250, complete


def test_futures_are_complete_when_wait_returns(ranks):
    ranks.world(2).run(futures_are_complete_after_wait)


def waits_beside_a_callback_that_blocks() -> None:
    rank, world = me()
    entered, free = threading.Event(), threading.Event()

    def block(_: object) -> None:
        entered.set()
        free.wait()

    # Nothing was sent yet, so that it does not run here.
    blocked = dist.irecv(torch.zeros(1), src=1 - rank).get_future().then(block)
    dist.barrier()
    dist.send(torch.ones(1), dst=1 - rank)
    try:
        assert entered.wait(30)
        for _ in range(20):
            work = dist.all_reduce(torch.ones(3), async_op=True)
            future = work.get_future()
            assert work.wait()
    finally:
        free.set()
    blocked.wait()
    check(future.wait()[0], torch.full((3,), float(world)), "the future afterwards")


def test_wait_does_not_wait_for_a_callback_that_blocks(ranks):
    ranks.world(2).run(waits_beside_a_callback_that_blocks)


def waits_inside_a_callback() -> None:
    _, world = me()

    def look(_: object) -> torch.Tensor:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        future = work.get_future()
        work.wait()
        # At once on the callback thread, where nobody else could complete it; soon on another.
        wait_until(future.done, "the future", patience=20)
        return future.value()[0]

    first = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    check(first.then(look).wait(), torch.full((3,), float(world)), "value() in a callback")


def test_futures_are_complete_after_a_wait_inside_a_callback(ranks):
    ranks.world(2).run(waits_inside_a_callback)


def barrier_orders() -> None:
    for _ in range(20):
        dist.barrier()
    assert dist.barrier(async_op=True).wait()


def test_barriers_pass_in_every_world(ranks):
    for size in WORLDS:
        ranks.world(size).run(barrier_orders)


def any_dtype() -> None:
    rank, world = me()
    for dtype in (torch.complex64, torch.uint16, torch.float8_e5m2):
        bits = [torch.full((8 * 3,), source + 1, dtype=torch.uint8) for source in range(world)]
        tensor = bits[rank].clone().view(dtype)
        outputs = [torch.zeros(24, dtype=torch.uint8).view(dtype) for _ in range(world)]
        dist.group.WORLD.allgather([outputs], [tensor]).wait()
        for source, output in enumerate(outputs):
            check(output.view(torch.uint8), bits[source], (dtype, "gathered"))
        dist.broadcast(tensor, world - 1)
        check(tensor.view(torch.uint8), bits[-1], (dtype, "broadcast"))


def test_data_of_any_dtype_can_be_moved(ranks):
    ranks.world(3).run(any_dtype)


def bits_of_bools() -> None:
    rank, _ = me()
    for op, expected in (("BAND", [False, False]), ("BOR", [False, True])):
        tensor = torch.tensor([False, rank == 1])
        dist.all_reduce(tensor, reduce_op(op))
        check(tensor, torch.tensor(expected), op)


def test_bools_are_reduced_by_bitwise_operations_too(ranks):
    ranks.world(3).run(bits_of_bools)


def complex_values() -> None:
    rank, world = me()
    tensor = torch.complex(torch.arange(5.0) + rank, torch.ones(5))
    dist.all_reduce(tensor)
    real = torch.arange(5.0) * world + world * (world - 1) / 2
    check(tensor, torch.complex(real, torch.full((5,), float(world))), "sum")
    outputs = [torch.zeros(2, dtype=torch.complex64) for _ in range(world)]
    dist.all_gather(outputs, torch.full((2,), complex(rank, -rank), dtype=torch.complex64))
    assert outputs[-1][0] == complex(world - 1, 1 - world)


def test_complex_tensors_are_summed_and_gathered(ranks):
    ranks.world(3).run(complex_values)


def traffic_is_counted() -> None:
    before = backend().stats()
    dist.barrier()  # a faster rank's bytes may be read, and counted, ahead of the operation
    dist.all_reduce(torch.ones(1000))
    assert backend().stats()["operations"] == before["operations"] + 2
    for name in ("bytes_sent", "bytes_received"):  # the network thread counts after it delivers
        wait_until(lambda name=name: backend().stats()[name] - before[name] >= 2000, name)


def test_stats_count_operations_and_bytes(ranks):
    ranks.world(2).run(traffic_is_counted)


def import_path() -> str:
    return sys.modules["torchft_ext"].__file__


def test_ranks_test_the_package_that_pytest_sees(ranks):
    import torchft_ext

    assert ranks.world(1).run(import_path) == [torchft_ext.__file__]
