"""How survivors agree on what to go on from.

A failed step may have succeeded on some ranks: those have updated their parameters, the others have
not. The furthest one's state is taken by all, and compared, before training goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Parameters, buffers, and the optimizer's state, in an order that is the same everywhere."""
    yield from model.state_dict().values()
    for state in optimizer.state_dict()["state"].values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    hashed = hashlib.sha256()
    for tensor in tensors_of(model, optimizer):
        hashed.update(tensor.detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def take_furthest(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> int:
    """Give all ranks the state of the rank that has done most steps; return how many those are.

    Raises CommError when yet another worker is lost meanwhile: call it again in the next
    generation.
    """
    steps = gather_numbers([step])
    furthest = max(range(len(steps)), key=lambda rank: steps[rank])
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=furthest)
    state = [optimizer.state_dict()]
    dist.broadcast_object_list(state, src=furthest)
    if dist.get_rank() != furthest:
        optimizer.load_state_dict(state[0])
    return steps[furthest][0]


def compare(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError on every rank unless all ranks hold the same state, bit by bit."""
    mine = bytes.fromhex(digest(model, optimizer))
    words = [int.from_bytes(mine[i : i + 4], "little") for i in range(0, len(mine), 4)]
    everyones = gather_numbers(words)
    if any(other != everyones[0] for other in everyones):
        raise RuntimeError(f"the state differs between ranks: {everyones}")


def gather_numbers(numbers: list[int]) -> list[list[int]]:
    """Everyone's numbers, by rank."""
    mine = torch.tensor(numbers, dtype=torch.int64)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [tensor.tolist() for tensor in gathered]
