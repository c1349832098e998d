"""How far apart two members' tensors are, without sending them."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from torchft_ext.elastic._wire import Wire

__all__ = ["distance", "distances", "sketch"]

_PROJECTIONS = 16
_SKETCH = _PROJECTIONS + 1  # numbers of one tensor
_CHUNK = 1 << 14  # elements; with their signs they stay in a core's cache


def distances(
    wire: Wire,
    own: Mapping[str, torch.Tensor],
    pairs: Mapping[str, Sequence[tuple[int, int]]],
) -> dict[str, float]:
    """Return how far members' tensors are apart, relative to norms. Blocks, in one collective of
    all members of the view.

    Args:
        wire: over the view's group.
        own: this member's tensors, by path.
        pairs: by path, the same on all members: a rank, and the one that it is compared with.

    Returns:
        The largest distance, by path; the same on all.
    """
    if not pairs:
        return {}
    layout = struct.Struct(f"<{_SKETCH}d")
    nothing = [0.0] * _SKETCH
    mine = [sketch(own[path]) if path in own else nothing for path in pairs]
    gathered = wire.all_gather_bytes(b"".join(layout.pack(*numbers) for numbers in mine))
    rows = [list(layout.iter_unpack(data)) for data in gathered]
    return {
        path: max(distance(rows[rank][at], rows[other][at]) for rank, other in of_path)
        for at, (path, of_path) in enumerate(pairs.items())
    }


@torch.no_grad()
def sketch(tensor: torch.Tensor) -> list[float]:
    """Describe a tensor in 17 numbers: projections on 16 vectors of random signs, and its norm.

    The mean square of the differences of two tensors' projections estimates the square of their
    distance, with a standard deviation of a third of it (Johnson and Lindenstrauss, 1984; the signs
    after Achlioptas, 2003). Reads the tensor once, in double precision; on its device.
    """
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    found = torch.zeros(_SKETCH, dtype=torch.float64, device=tensor.device)
    for number, chunk in enumerate(plain.detach().reshape(-1).split(_CHUNK)):
        values = chunk.to(torch.float64)
        # Signs of its own for each chunk: equal differences of two chunks must not cancel out.
        turn = _signs(1 + number, tensor.device)[:, 0]
        found[:-1] += turn * torch.mv(_signs(0, tensor.device)[:, : values.numel()], values)
        found[-1] += values.square().sum()
    found[-1] = found[-1].sqrt()
    return [float(one) for one in found.tolist()]


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the distance of two sketched tensors, relative to the norm of the other one."""
    square = sum((a - b) ** 2 for a, b in zip(one[:-1], other[:-1], strict=True)) / _PROJECTIONS
    if square == 0.0:
        return 0.0
    return math.sqrt(square) / other[-1] if square < math.inf and other[-1] > 0.0 else math.inf


@lru_cache(maxsize=4)
def _table(device: torch.device) -> torch.Tensor:
    """`[_PROJECTIONS, _CHUNK]`, float64: 1 and -1, the same on all members."""
    draw = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, (_PROJECTIONS, _CHUNK), generator=draw, dtype=torch.int8)
    return (2 * signs - 1).to(device, torch.float64)


def _signs(number: int, device: torch.device) -> torch.Tensor:
    """The table; of a chunk's number another column comes first."""
    table = _table(device)
    return table if number == 0 else table[:, number * 7919 % _CHUNK :]
