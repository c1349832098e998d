"""Fingerprints of tensors: 2 x 64 bits that depend on every byte and on its place."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache

import torch
import torch.nn.functional as F

__all__ = ["fingerprints", "flat_bytes"]

_LANES = 1 << 16  # 32-bit lanes of one chunk: with their weights they stay in a core's cache
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def fingerprints(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """Hash the values of tensors, on their devices; blocks until the results are here.

    Each 32-bit lane of a tensor's bytes is multiplied with an odd 64-bit weight of its place, and
    the products are summed modulo 2**64; twice, with two sequences of weights. Two tensors whose
    bytes differ have equal sums with a chance of about 2**-64. Half the width of a weight is kept
    free on purpose: with 64-bit lanes, two flipped signs would cancel each other in both sums. It
    guards against faults, not against forgery. The layout in memory does not matter, the dtype
    and the shape are not in it.

    Args:
        tensors: dense, of any dtype and device.

    Returns:
        16 bytes for each.
    """
    return [struct.pack("<2q", *sums) for sums in _to_host([_sums(t) for t in tensors])]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values as bytes in the order of its indices.

    Args:
        tensor: dense, of any dtype.

    Returns:
        `[nbytes]`, uint8, on its device: a view of it where it is contiguous, else of a copy.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """`[2]`, int64, on the tensor's device."""
    data = flat_bytes(tensor)
    total = torch.full((2,), data.numel(), dtype=torch.int64, device=data.device)
    for number, chunk in enumerate(data.split(4 * _LANES)):
        if chunk.numel():
            total += _weighted(_lanes(chunk)) * _signed(_splitmix(number) | 1)
    return total


def _lanes(chunk: torch.Tensor) -> torch.Tensor:
    """`[n]`, int32: the bytes, filled up with zeros."""
    missing = -chunk.numel() % 4
    if missing:
        chunk = F.pad(chunk, (0, missing))
    elif chunk.storage_offset() % 4:  # view() asks for alignment
        chunk = chunk.clone()
    return chunk.view(torch.int32)


def _weighted(lanes: torch.Tensor) -> torch.Tensor:
    """`[2]`, int64: the sums of one chunk."""
    weights = _weights(lanes.device)[:, : lanes.numel()]
    wide = lanes.to(torch.int64)
    if lanes.device.type == "cpu":  # elsewhere there is no product of integer matrices
        return torch.mv(weights, wide)
    return (weights * wide).sum(dim=1)


@lru_cache
def _weights(device: torch.device) -> torch.Tensor:
    """`[2, _LANES]`, int64, odd: splitmix64 of 1, 2, ... (Steele et al., OOPSLA 2014)."""
    x = torch.arange(1, 2 * _LANES + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(_MIX1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX2)
    return ((x ^ _shifted(x, 31)) | 1).view(2, _LANES)


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """To the right, with zeros, as unsigned numbers are."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _splitmix(number: int) -> int:
    """Another 64 bits for each number; the second sequence's place in the first is far away."""
    x = (number + (1 << 32)) * _GOLDEN % (1 << 64)
    x = (x ^ (x >> 30)) * _MIX1 % (1 << 64)
    x = (x ^ (x >> 27)) * _MIX2 % (1 << 64)
    return x ^ (x >> 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _to_host(sums: list[torch.Tensor]) -> list[list[int]]:
    """All numbers, by one copy from each device."""
    if not sums:
        return []
    found: list[list[int]] = [[] for _ in sums]
    for device in {tensor.device for tensor in sums}:
        places = [place for place, tensor in enumerate(sums) if tensor.device == device]
        rows = torch.stack([sums[place] for place in places]).tolist()
        for place, row in zip(places, rows, strict=True):
            found[place] = row
    return found
