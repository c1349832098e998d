"""What torch's operations are given, whatever their arguments are called. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
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
