"""Random numbers that depend on a seed, the step and the rank, and on nothing that went before."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

__all__ = ["generator", "manual_seed", "mixed"]


def mixed(*numbers: int) -> int:
    """Return a seed of 63 bits that depends on all of these numbers and on their order."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def manual_seed(seed: int, step: int, rank: int = 0) -> int:
    """Seed this process's random numbers: of torch on all devices, Python, numpy where imported.

    Called at the begin of each step, it makes a repeated step draw the same numbers, on a newcomer
    too: random state is never copied between members. Step.manual_seed() names step and rank. Does
    not block.

    Args:
        seed: the run's; the same on all ranks.
        step: the number of the step.
        rank: equal ones draw alike, such as 0 on all ranks for a mask that all must share.

    Returns:
        The seed that was derived, of 63 bits.

    Threads: any; the states that it sets are the process's. Source: torch.manual_seed().
    """
    derived = mixed(seed, step, rank)
    torch.manual_seed(derived)
    random.seed(derived)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(derived % (1 << 32))
    return derived


def generator(
    seed: int, step: int, rank: int = 0, *, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a generator of its own for a step and rank; see manual_seed()."""
    return torch.Generator(device).manual_seed(mixed(seed, step, rank))
