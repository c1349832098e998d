"""What torch's operations are given, whatever their arguments are called. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# The names in torch's overloads of all operations and versions, in the order of their places.
_NAMES = (
    "output_tensors",
    "output_tensor",
    "output_lists",
    "outputs",
    "output",
    "outputTensors",
    "outputTensor",
    "tensors",
    "tensor",
    "input_tensors",
    "input_tensor",
    "input_list",
    "inputs",
    "input",
    "inputTensors",
    "inputTensor",
    "output_split_sizes",
    "input_split_sizes",
    "root",
    "dstRank",
    "srcRank",
    "tag",
    "op",
    "opts",
    "timeout",
)

_MOST_RANKS = 1 << 16  # as csrc/comm/group.h has it
_LONGEST = timedelta(days=36525)  # a century, which means never: what threads wait has an end


def limit_of(call: str, timeout: object) -> timedelta:
    """Return a timeout, seconds or a timedelta, as a timedelta.

    Raises:
        ValueError: it is not positive, or less than a timedelta can hold.
        TypeError: it is no time.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (float, int, timedelta)):
        found = type(timeout).__name__
        raise TypeError(f"{call}: timeout: expected seconds or a timedelta, found {found}")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not seconds > 0:
        raise ValueError(f"{call}: timeout: expected a positive time, found {seconds:g} s")
    if seconds > _LONGEST.total_seconds():
        return _LONGEST
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=seconds)
    if not limit:  # it would mean that there is none
        raise ValueError(f"{call}: timeout: expected a microsecond at least, found {seconds:g} s")
    return limit


def seconds_of(limit: timedelta) -> float:
    """Return a limit in seconds, as threads can wait for: not more than a century."""
    return min(limit, _LONGEST).total_seconds()


def check_place(rank: int, world_size: int) -> None:
    """Refuse what Backend.configure() refuses, whose words these are, before a generation ends.

    Raises:
        ValueError: a size that no group has, or a rank that is not in it.
    """
    if world_size < 1:
        raise ValueError(f"configure: world_size: expected at least 1, found {world_size}")
    if world_size > _MOST_RANKS:
        raise ValueError(
            f"configure: world_size: expected at most {_MOST_RANKS}, found {world_size}"
        )
    if not 0 <= rank < world_size:
        raise ValueError(
            f"configure: rank: expected a rank from 0 to {world_size - 1}, found {rank}"
        )


def in_order(named: dict[str, Any]) -> dict[str, Any]:
    """Return arguments given by name in the order that they have without names."""
    if len(named) < 2:
        return named
    known = {name: named[name] for name in _NAMES if name in named}
    return {**known, **named}


def tensors_in(value: object) -> Iterable[torch.Tensor]:
    """Yield the tensors of nested lists, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


def reduction_in(given: Iterable[Any]) -> Any:
    """Return the reduction among an operation's arguments, in options or by itself; else SUM."""
    chosen: Any = dist.ReduceOp.SUM
    for value in given:
        op = getattr(value, "reduceOp", value)
        if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            chosen = op
    return chosen
