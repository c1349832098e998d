"""Inputs that every rank can compute for every other, and what a reduction of them must give."""

from __future__ import annotations

import functools
import hashlib

import torch
import torch.distributed as dist

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
NUMBERS = FLOATS + INTEGERS
DTYPES = (*NUMBERS, torch.bool)
SIZES = (0, 1, 7, 1025)
LARGE = 1_048_583  # a prime: more than one chunk, and divisible by no world size
BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", *BITWISE)


def pattern(rank: int, size: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small whole numbers: sums and products over 5 ranks are exact in every dtype."""
    numbers = torch.arange(size, dtype=torch.int64) * 7 + rank * 3 + salt
    if dtype == torch.bool:
        return numbers % 3 == 0
    if dtype == torch.uint8:
        return (numbers % 3).to(dtype)
    return (numbers % 5 - 2).to(dtype)


def noise(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values whose sum depends on the order of summation."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(size, generator=generator, dtype=torch.float32).to(dtype) * 100


def reduced(op: str, contributions: list[torch.Tensor]) -> torch.Tensor:
    if op in BITWISE:
        return functools.reduce(BITWISE[op], contributions)
    dtype = contributions[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack([c.to(wide) for c in contributions])
    if op in ("SUM", "AVG"):
        result = stacked.sum(0)
    elif op == "PRODUCT":
        result = stacked.prod(0)
    else:
        result = stacked.amin(0) if op == "MIN" else stacked.amax(0)
    if op == "AVG":
        rounding = None if dtype.is_floating_point else "trunc"
        result = torch.div(result, len(contributions), rounding_mode=rounding)
    return result.to(dtype)


def reduced_patterns(op: str, world: int, size: int, dtype: torch.dtype, salt: int = 0):
    return reduced(op, [pattern(rank, size, dtype, salt) for rank in range(world)])


def allowed(op: str, dtype: torch.dtype) -> bool:
    if op in BITWISE:
        return not dtype.is_floating_point
    return not (op == "AVG" and dtype == torch.bool)


def check(found: torch.Tensor, expected: torch.Tensor, what: object, exact: bool = True) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    if exact:
        assert torch.equal(found, expected), f"{what}: found {found}, expected {expected}"
    else:
        torch.testing.assert_close(found, expected, msg=lambda text: f"{what}: {text}")


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def me() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def check_sum() -> None:
    """The generation works: an exact sum over whatever world this is."""
    rank, world = me()
    tensor = torch.full((33,), rank + 1, dtype=torch.float64)
    dist.all_reduce(tensor)
    check(tensor, torch.full_like(tensor, world * (world + 1) / 2), "the sum over the generation")
