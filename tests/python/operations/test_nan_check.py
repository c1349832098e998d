"""Options(nan_check=True): a NaN that a rank brings into an operation is told to all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Call
from values import check, me

NAN = float("nan")


def tensor_of(value: float, dtype: torch.dtype = torch.float32, where: str = "cpu") -> torch.Tensor:
    tensor = torch.zeros(5, dtype=dtype)
    tensor[3] = value
    return tensor.to(where)


def all_reduce(value: float, where: str) -> None:
    dist.all_reduce(tensor_of(value, where=where))


def broadcast(value: float, where: str) -> None:
    dist.broadcast(tensor_of(value, where=where), src=1)


def all_gather(value: float, where: str) -> None:
    outputs = [torch.empty(5, device=where) for _ in range(me()[1])]
    dist.all_gather(outputs, tensor_of(value, where=where))


def all_gather_in_place(value: float, where: str) -> None:
    rank, world = me()
    whole = torch.full((5 * world,), NAN, device=where)  # what is overwritten may be anything
    mine = whole[5 * rank : 5 * rank + 5]
    mine.copy_(tensor_of(value, where=where))
    dist.all_gather_into_tensor(whole, mine)


def reduce_scatter(value: float, where: str) -> None:
    world = me()[1]
    inputs = torch.cat([tensor_of(value, where=where) for _ in range(world)])
    dist.reduce_scatter_tensor(torch.full((5,), NAN, device=where), inputs)


def apart(value: float, where: str) -> torch.Tensor:
    """Every other element, with NaN between them."""
    whole = torch.full((10,), NAN, device=where)
    whole[::2] = tensor_of(value, where=where)
    return whole[::2]


def all_reduce_apart(value: float, where: str) -> None:
    dist.all_reduce(apart(value, where))


def all_gather_apart(value: float, where: str) -> None:
    dist.all_gather_into_tensor(torch.empty(5 * me()[1], device=where), apart(value, where))


def reduce_scatter_apart(value: float, where: str) -> None:
    """The NaN is in the last part alone; what stands in for the parts may lie end to end."""
    world = me()[1]
    parts = torch.zeros(128, 64 * world, device=where)
    parts[0, -1] = value
    dist.reduce_scatter(torch.empty(128, 64, device=where), list(parts.chunk(world, dim=1)))


def transfer(value: float, where: str) -> None:
    if me()[0] == 1:
        dist.send(tensor_of(value, where=where), 0)
    else:
        dist.recv(torch.full((5,), NAN, device=where), 1)


OPERATIONS = {
    function.__name__: function
    for function in (
        all_reduce,
        broadcast,
        all_gather,
        all_gather_in_place,
        reduce_scatter,
        all_reduce_apart,
        all_gather_apart,
        reduce_scatter_apart,
        transfer,
    )
}


def run(name: str, value: float, where: str = "cpu") -> None:
    OPERATIONS[name](value, where)


def expect_told(calls: list[Call]) -> None:
    """All of them fail, and name rank 1."""
    for call in calls:
        error = call.error("CommAbortedError")
        assert error.cause["rank"] == 1
        assert "nan_check found NaN in its input of the " in error.text


@pytest.mark.parametrize("name", OPERATIONS)
def test_nan_in_an_operation_is_told_to_all_who_name_its_rank(ranks, name):
    world = ranks.world(2, nan_check=True)
    world.run(run, name, 1.0)
    expect_told([world.start(0, run, name, 1.0), world.start(1, run, name, NAN)])
    world.next(nan_check=True).run(run, name, 1.0)


def reduce_of(dtype: torch.dtype) -> None:
    dist.all_reduce(tensor_of(NAN if me()[0] == 0 else 1.0, dtype))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.half, torch.bfloat16, torch.complex64], ids=str
)
def test_nan_of_every_dtype_that_has_one_is_found(ranks, dtype):
    world = ranks.world(2, nan_check=True)
    for call in world.start_all(reduce_of, dtype):
        assert call.error("CommAbortedError").cause["rank"] == 0


def sum_with_nan() -> None:
    tensor = tensor_of(NAN if me()[0] == 0 else 1.0)
    dist.all_reduce(tensor)
    check(tensor.isnan(), torch.tensor([False, False, False, True, False]), "NaN")
    dist.all_reduce(torch.ones(3, dtype=torch.int64))


def broadcast_over_nan() -> None:
    tensor = torch.full((5,), NAN if me()[0] == 1 else 2.0)
    dist.broadcast(tensor, src=0)
    check(tensor, torch.full((5,), 2.0), "broadcast")


def test_nan_goes_through_unless_asked_for_and_what_is_overwritten_may_hold_it(ranks):
    ranks.world(2).run(sum_with_nan)
    ranks.world(2, nan_check=False).run(sum_with_nan)
    ranks.world(2, nan_check=True).run(broadcast_over_nan)
