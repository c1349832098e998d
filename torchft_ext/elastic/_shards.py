"""Sharded tensors: torch's DTensor, of which each member holds one part.

DTensor is imported only where one is made: that module takes long.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

__all__ = [
    "check_shard",
    "dress",
    "forget_meshes",
    "is_shard",
    "local_of",
    "placements_of",
]


def is_shard(tensor: torch.Tensor) -> bool:
    """Return whether this process holds a part of the tensor (a DTensor)."""
    return hasattr(tensor, "device_mesh")


def placements_of(tensor: torch.Tensor) -> str:
    """Return how the tensor lies on its mesh, in words that are equal for equal placements."""
    sharded: Any = tensor
    return str(tuple(sharded.placements))


def check_shard(path: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose parts are no values yet.

    Raises:
        TypeError: one of its placements is Partial.
    """
    sharded: Any = tensor
    if any(placement.is_partial() for placement in sharded.placements):
        raise TypeError(f"{path}: expected a sharded tensor, found {placements_of(tensor)}")


def forget_meshes() -> None:
    """Make operations of DTensor forget the meshes that they have seen.

    DTensor keeps what its operations return, by meshes that compare equal: a mesh of the same ranks
    in another view would get back that of the view before, whose groups have ended.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute

    # As torch.distributed.tensor.debug does it, whose import takes 0.3 s and needs numpy.
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", _nothing)()
    # Private, and not in all versions: plans of redistributions, which hold meshes too.
    getattr(_redistribute, "clear_redistribute_planner_cache", _nothing)()
    for function in vars(_redistribute).values():
        getattr(function, "cache_clear", _nothing)()


def _nothing() -> None:
    pass


@torch.no_grad()
def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part: the memory itself, not a copy."""
    sharded: Any = tensor.detach()
    part: torch.Tensor = sharded.to_local()
    return part


@torch.no_grad()
def dress(
    local: torch.Tensor, shape: tuple[int, ...], placements: str, like: Iterable[torch.Tensor]
) -> torch.Tensor:
    """Make a sharded tensor of this process's part. Does not communicate, does not copy.

    Args:
        local: the part.
        shape: of the whole.
        placements: placements_of() one that lies on the mesh alike.
        like: sharded tensors of this process; one of the same placements says which mesh.

    Raises:
        ValueError: none of them has these placements.
    """
    from torch.distributed.tensor import DTensor

    alike: list[Any] = [tensor for tensor in like if placements_of(tensor) == placements]
    if not alike:
        raise ValueError(f"no tensor of the model lies on its mesh as {placements}")
    chosen = next((tensor for tensor in alike if tuple(tensor.shape) == shape), None)
    mesh, placed = alike[0].device_mesh, alike[0].placements
    stride = torch.empty(shape, device="meta").stride() if chosen is None else chosen.stride()
    made: torch.Tensor = DTensor.from_local(
        local, mesh, placed, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return made
