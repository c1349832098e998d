"""Sparse COO tensors on the CPU: their sum, what becomes of the tensor, and DDP's use of it."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from rankside import abort, backend, errored, kept, wait_until
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from values import DTYPES, check, check_sum, digest, me

import torchft_ext

ROWS = 40
DENSE = ((), (3,), (2, 2))  # sizes of the dense dimensions
NUMBERS = (0, 1, 7, 100)  # rows that a rank gives; 100: many of them several times


def sparse(rank: int, rows: int, dtype: torch.dtype, dense: tuple[int, ...] = (), dims: int = 1):
    """Rows at drawn places, some of them several times; sums over five ranks are exact."""
    generator = torch.Generator().manual_seed(1000 * rank + rows)
    sizes = (ROWS, 5, 2)[:dims]
    indices = torch.stack([torch.randint(0, s, (rows,), generator=generator) for s in sizes])
    values = torch.randint(0, 2, (rows, *dense), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (*sizes, *dense))


def dense_sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Of all of them; of booleans the disjunction."""
    dtype = tensors[0].dtype
    total = sum(t.coalesce().to(torch.float64).to_dense() for t in tensors)
    return (total > 0) if dtype == torch.bool else total.to(dtype)


def check_sparse(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert found.is_coalesced(), what
    cells = [tuple(cell) for cell in found.indices().t().tolist()]
    assert cells == sorted(set(cells)), (what, "indices")
    wide = found.to(torch.float64).to_dense()
    check(wide, expected.to(torch.float64), what)


def sums() -> None:
    rank, world = me()
    for dtype, dense, dims in itertools.product((*DTYPES, torch.complex64), DENSE, (1, 3)):
        for first in range(len(NUMBERS)):
            rows = [NUMBERS[(first + r) % len(NUMBERS)] for r in range(world)]
            everyone = [sparse(r, rows[r], dtype, dense, dims) for r in range(world)]
            tensor = everyone[rank].clone()
            backend().allreduce([tensor]).wait()
            what = (dtype, dense, dims, rows)
            if dtype == torch.complex64:
                check(tensor.to_dense(), sum(t.to_dense() for t in everyone), what)
            else:
                check_sparse(tensor, dense_sum(everyone), what)


@pytest.mark.parametrize("size", (1, 2, 3, 5))
def test_sum_of_sparse_tensors_is_that_of_all_ranks(ranks, size):
    ranks.world(size).run(sums)


def large() -> str:
    """Longer than a turn of the engine's thread; values whose sum depends on the order."""
    rank, _ = me()
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(0, 200_000, (1, 100_000 + rank), generator=generator)
    values = torch.randn(100_000 + rank, 4, generator=generator)
    tensor = torch.sparse_coo_tensor(indices, values, (200_000, 4)).coalesce()
    expected = tensor.to_dense()
    dist.all_reduce(expected)
    dist.all_reduce(tensor)
    torch.testing.assert_close(tensor.to_dense(), expected)
    return digest(tensor.values()) + digest(tensor.indices())


def test_sum_of_sparse_tensors_has_the_same_bits_on_all_ranks(ranks):
    assert len(set(ranks.world(3).run(large))) == 1


def work_of_a_sum() -> None:
    rank, _ = me()
    tensor = sparse(rank, 6, torch.float32)
    work = backend().allreduce([tensor])
    future = work.get_future()
    work.wait()
    assert work.is_completed() and work.is_success()
    if not torch.__version__.startswith("2.11."):  # its binding cannot give an exception
        assert work.exception() is None
    assert [t is tensor for t in work.result()] == [True]
    assert [t is tensor for t in future.value()] == [True]
    total = sparse(rank, 6, torch.float32)
    backend().allreduce_coalesced([total, dense := torch.ones(3)]).wait()
    check_sparse(total, tensor.to_dense(), "beside a dense one")
    check(dense, torch.full((3,), 2.0), "beside a sparse one")


def test_work_of_a_sparse_sum_gives_the_tensor(ranks):
    ranks.world(2).run(work_of_a_sum)


def chained() -> None:
    """Each issued before the one before it is through; the tensor is not coalesced at first."""
    rank, world = me()
    tensor = sparse(rank, 50, torch.float64, (3,))
    once = dense_sum([sparse(r, 50, torch.float64, (3,)) for r in range(world)])
    big = torch.ones(1_000_000)
    works = [dist.all_reduce(big, async_op=True)]
    works += [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    works.append(dist.all_reduce(big, async_op=True))
    for work in works:
        work.wait()
    check_sparse(tensor, once * world**2, "three sums in a row")
    check(big, torch.full_like(big, world**2), "a dense one behind them")


def test_sparse_sums_in_flight_follow_one_another(ranks):
    ranks.world(3).run(chained)


def ones_at(index: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.sparse_coo_tensor([[index]], torch.ones(1, dtype=dtype), (size,))


DIFFERENT = {
    "sizes": (lambda: ones_at(0, 4), lambda: ones_at(0, 5)),
    "dimensions": (lambda: ones_at(0, 4), lambda: torch.eye(4).to_sparse()),
    "dense_dimensions": (
        lambda: torch.eye(4).to_sparse(1),
        lambda: torch.eye(4).to_sparse(2),
    ),
    "dtypes": (lambda: ones_at(0, 4), lambda: ones_at(0, 4, torch.float64)),
    "layouts": (lambda: ones_at(0, 4), lambda: torch.ones(4)),
    "unordered_indices": (
        lambda: ones_at(0, 4),
        lambda: torch.sparse_coo_tensor([[3, 1]], [1.0, 2.0], (4,))._coalesced_(True),
    ),
}


def sum_different(case: str) -> None:
    tensor = DIFFERENT[case][me()[0]]()
    before = tensor.to_dense().clone()
    try:
        dist.all_reduce(tensor)
    finally:
        check(tensor.to_dense(), before, "of a failed operation")


@pytest.mark.parametrize("case", DIFFERENT)
def test_sparse_tensors_that_differ_get_a_mismatch_error(ranks, case):
    world = ranks.world(2)
    for call in world.start_all(sum_different, case):
        error = call.error("MismatchError")
        assert "allreduce" in error.text
        if "dimensions" in case or case == "sizes":
            assert "sparse dimensions do not match" in error.text
    world.next().run(check_sum)


def refusals() -> None:
    tensor = ones_at(0, 4)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
        with pytest.raises(NotImplementedError, match="unsupported reduction operation"):
            dist.all_reduce(tensor, op)
    with pytest.raises(ValueError, match="at most 16 dimensions, found 17"):
        dist.all_reduce(torch.ones((1,) * 17).to_sparse())
    with pytest.raises(ValueError, match="dense tensor"):
        backend().broadcast([tensor])
    with pytest.raises(ValueError, match="dense tensor"):
        backend().allreduce([torch.eye(3).to_sparse_csr()])
    check_sum()


def test_sparse_tensors_that_cannot_be_summed_are_refused(ranks):
    world = ranks.world(2)
    world.run(refusals)
    assert world.run(errored) == [None, None]


def left_alone() -> None:
    rank, _ = me()
    tensor = sparse(rank, 30, torch.float32, (3,))
    indices, values = tensor._indices(), tensor._values()
    if rank == 0:
        sent = backend().stats()["bytes_sent"]
        work = dist.all_reduce(tensor, async_op=True)
        wait_until(lambda: backend().stats()["bytes_sent"] > sent, "the first bytes of it")
        backend().abort("the test's")
        with pytest.raises(torchft_ext.CommAbortedError):
            work.wait()
        assert not tensor.is_coalesced()
        check(tensor._indices(), indices, "of a failed operation")
        check(tensor._values(), values, "of a failed operation")
    else:
        wait_until(lambda: backend().errored() is not None, "the other's abort")


def test_aborted_sparse_sum_leaves_the_tensor_alone(ranks):
    world = ranks.world(2)
    world.run(left_alone)
    world.next().run(check_sum)


def sum_in_a_loop() -> None:
    """Whole or untouched, whenever the generation ends."""
    rank, world = me()
    whole = dense_sum([sparse(r, 3000, torch.float64, (9,)) for r in range(world)])
    own = sparse(rank, 3000, torch.float64, (9,))
    while True:
        tensor = own.clone()
        try:
            dist.all_reduce(tensor)
        except torchft_ext.CommError:
            untouched = tensor._nnz() == own._nnz() and torch.equal(tensor._values(), own._values())
            assert untouched or torch.equal(tensor.to_dense(), whole)
            return
        check(tensor.to_dense(), whole, "a sum")


@pytest.mark.parametrize("how", ("abort", "kill"))
def test_sparse_sum_that_is_ended_at_any_moment_is_whole_or_untouched(ranks, how):
    world = ranks.world(3)
    calls = [world.start_blocked(rank, sum_in_a_loop) for rank in range(3)]
    if how == "kill":
        world.kill(2)
        calls = calls[:2]
    else:
        world.side(2, abort)
    for call in calls:
        call.value()


def sum_with_nan(rank_with: int) -> None:
    value = float("nan") if me()[0] == rank_with else 1.0
    dist.all_reduce(torch.sparse_coo_tensor([[2]], [value], (4,)))


def test_nan_in_a_sparse_tensor_is_told(ranks):
    world = ranks.world(2, nan_check=True)
    world.run(sum_with_nan, -1)
    for call in world.start_all(sum_with_nan, 1):
        assert "nan_check found NaN" in call.error("CommAbortedError").text


def embedding_model() -> nn.Module:
    torch.manual_seed(3)
    embedding = nn.Embedding(50, 8, sparse=True)
    return nn.Sequential(embedding, nn.Flatten(), nn.Linear(32, 1))


def wrap_embedding() -> None:
    kept["sparse"] = DistributedDataParallel(embedding_model())


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randint(0, 50, (5, 4), generator=generator)).square().mean()


def train_embedding(steps: int) -> None:
    model = kept["sparse"]
    alone = copy.deepcopy(model.module)
    rank, world = me()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, rank, step).backward()
        assert model.module[0].weight.grad.is_sparse
        for each in range(world):
            (loss(alone, each, step) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
        for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, expected)


def test_ddp_trains_sparse_embeddings_and_goes_on_with_fewer(ranks):
    world = ranks.world(3)
    world.run(wrap_embedding)
    world.run(train_embedding, 3)
    world.next([0, 2]).run(train_embedding, 3)


def test_death_releases_a_sparse_sum(ranks):
    world = ranks.world(3)
    calls = [world.start_blocked(rank, sum_with_nan, -1) for rank in range(2)]
    world.kill(2)
    for call in calls:
        assert call.error("PeerLostError").cause["rank"] == 2
