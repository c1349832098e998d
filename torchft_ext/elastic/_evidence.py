"""What a member holds at a vote, for the digest that members compare in every step.

What is looked at is what a step can make differ: how far members are, what their samplers give,
plain values of optimizers and schedulers, and a few bits of each gradient or parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchft_ext import _C
from torchft_ext.elastic._goal import Goal
from torchft_ext.elastic._sampler import BatchSampler
from torchft_ext.elastic._shards import is_shard, local_of
from torchft_ext.elastic._state import State, bare_tensors
from torchft_ext.elastic._view import Digest
from torchft_ext.elastic._watched_values import WatchedValues

__all__ = ["Check", "Comparison", "Evidence", "Rows"]

Check = Literal["gradients", "state"] | None

_HASH = 8  # bytes of one tensor's
_Whose = tuple[str, int | None]  # an object of the state, and the number of an optimizer's group


@dataclass(frozen=True)
class Rows:
    """What is compared, in one order on members that hold the same.

    Attributes:
        values: the encoding of plain values, by path.
        names: of the tensors.
        hashes: 8 bytes for each of these.
    """

    values: Mapping[str, bytes] = field(default_factory=dict)
    names: Sequence[str] = ()
    hashes: bytes = b""

    def digest(self) -> bytes:
        """Return 16 bytes that are equal where the rows are; none where there are no rows."""
        if not self.values and not self.hashes:
            return b""
        names = "\0".join(self.values).encode()
        data = b"".join((names, *self.values.values(), self.hashes))
        return blake2b(data, digest_size=16).digest()

    def tensors(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and hash of each tensor."""
        for at, name in enumerate(self.names):
            yield name, self.hashes[at * _HASH : (at + 1) * _HASH]


@dataclass(frozen=True)
class Evidence:
    """What one member's vote is about.

    Attributes:
        common: what all members hold alike.
        of_shard: what the members that hold one shard hold alike.
        shard: the number of that shard.
    """

    common: Rows = Rows()
    of_shard: Rows = Rows()
    shard: int = 0

    def digest(self) -> Digest:
        """Return what the vote carries."""
        return Digest(self.common.digest(), self.of_shard.digest(), self.shard)


class Comparison:
    """What members compare in the steps of one view: says what this one holds.

    Parameters are looked up once: make another one where the model is wrapped anew. Copies nothing
    on the CPU. Owner: a Loop. Threads: one at a time. It never communicates.
    """

    def __init__(self, state: State, goal: Goal, check: Check, shard: int | None) -> None:
        """Look the parameters up.

        Args:
            state: what is compared.
            goal: of the run.
            check: as steps() takes it.
            shard: the number of the shard that this member holds; None: sharded tensors, whose
                other holders are not known then, are not compared.
        """
        self._state = state
        self._goal = goal
        self._check = check
        self._shard = shard
        self._watched: dict[_Whose, WatchedValues] = {}
        tensors = _tensors_of(state, parameters=check == "state") if check else {}
        whole = {name: one for name, one in tensors.items() if not is_shard(one)}
        shards = {name: one for name, one in tensors.items() if is_shard(one)}
        kind = "gradient of" if check == "gradients" else "values of"
        self._tensors, self._names = list(whole.values()), _named(kind, whole)
        self._shards, self._shard_names = list(shards.values()), _named(kind, shards)

    def of_step(self) -> Evidence:
        """Say what this member holds once a step's gradients are there."""
        if self._check is None:
            return Evidence()
        gradients = self._check == "gradients"
        values, rates = self._plain_values()
        seed = self._state.step
        names, hashes = self._names, _C._sampled_bits(self._tensors, seed, gradients)
        if rates:
            names = [*names, *(f"values of {path}" for path in rates)]
            hashes += _C._sampled_bits(list(rates.values()), seed, False)
        return Evidence(Rows(values, names, hashes), *self._of_shard(gradients))

    def of_result(self) -> Evidence:
        """Say what this member holds after the last step: all that a sync compares, but buffers of
        modules; blocks until devices have hashed it.
        """
        if self._check is None:
            return Evidence()
        sharded = {path for part in self._state.encode().values() for path in part.shards}
        free = self._state.free_paths()
        hashes = {p: one[:_HASH] for p, one in self._state.fingerprints().items() if p not in free}
        common = {path: one for path, one in hashes.items() if path not in sharded}
        of_shard = {path: one for path, one in hashes.items() if path in sharded}
        if self._shard is None:
            of_shard = {}
        values, _ = self._plain_values()
        return Evidence(_rows(common, values), _rows(of_shard, {}), self._shard or 0)

    def _of_shard(self, gradients: bool) -> tuple[Rows, int]:
        if self._shard is None or not self._shards:
            return Rows(), 0
        here = [one.grad if gradients else one for one in self._shards]
        local = [None if one is None else _part(one) for one in here]
        hashes = _C._sampled_bits(local, self._state.step, False)
        return Rows({}, self._shard_names, hashes), self._shard

    def _plain_values(self) -> tuple[dict[str, bytes], dict[str, torch.Tensor]]:
        """Return encodings of plain values; and tensors among them, such as a learning rate for a
        compiled step. Both by path."""
        values: dict[str, bytes] = {}
        rates: dict[str, torch.Tensor] = {}
        for whose, tree in self._trees():
            watched = self._watched.get(whose)
            if watched is None:
                watched = self._watched[whose] = WatchedValues(_form(*whose))
            watched.look(tree)
            values |= watched.encoded
            rates |= watched.tensors
        return values, rates

    def _trees(self) -> Iterator[tuple[_Whose, Mapping[str, object]]]:
        yield ("", None), {"step": self._state.step, **dict(self._goal.values())}
        for name, value in self._state.objects.items():
            if isinstance(value, Optimizer):
                for number, group in enumerate(value.param_groups):
                    yield (name, number), group
            elif isinstance(value, BatchSampler):
                yield (name, None), _of_sampler(value)
            elif isinstance(value, LRScheduler):
                yield (name, None), value.state_dict()


def _form(name: str, group: int | None) -> str:
    """How the paths of values look, with {} for the key."""
    name = name.replace("{", "{{").replace("}", "}}")
    if group is not None:
        return f"{name}.param_groups[{group}][{{!r}}]"
    return name + ".{}" if name else "{}"


def _of_sampler(sampler: BatchSampler) -> Mapping[str, object]:
    return {
        "batch_size": sampler.batch_size,
        "micro_batches": sampler.micro_batches,
        "size": sampler.size,
        **sampler.state_dict(),
    }


def _tensors_of(state: State, *, parameters: bool) -> dict[str, torch.Tensor]:
    """By name: parameters, each once; where parameters are compared also bare tensors."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in _all_tensors(state, bare=parameters):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _all_tensors(state: State, *, bare: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state.objects.items():
        if isinstance(value, nn.Module):
            yield from ((f"{name}.{path}", one) for path, one in value.named_parameters())
        elif bare:
            yield from ((f"{name}[{key!r}]", one) for key, one in bare_tensors(value).items())
    for name, value in state.objects.items():
        if isinstance(value, Optimizer):
            for number, group in enumerate(value.param_groups):
                for at, one in enumerate(group["params"]):
                    yield f"{name}.param_groups[{number}]['params'][{at}]", one


def _rows(hashes: Mapping[str, bytes], values: Mapping[str, bytes]) -> Rows:
    return Rows(values, list(hashes), b"".join(hashes.values()))


def _named(kind: str, names: Iterable[str]) -> list[str]:
    return [f"{kind} {name}" for name in names]


def _part(sharded: Any) -> torch.Tensor | None:
    """This member's part; None: it is a sum that is not reduced yet."""
    if any(placement.is_partial() for placement in sharded.placements):
        return None
    return local_of(sharded)
