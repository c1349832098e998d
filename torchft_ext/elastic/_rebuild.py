"""Objects that are made anew for a view go on from what those before them held."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from torchft_ext.elastic._codec import Encoded, TensorMeta
from torchft_ext.elastic._loading import Leaves, load
from torchft_ext.elastic._shards import forget_meshes, local_of
from torchft_ext.elastic._state import State
from torchft_ext.elastic._view import View

__all__ = ["rebuild"]


def rebuild(state: State, build: Callable[[View], object], view: View, *, keep: bool) -> None:
    """Call build() and put what it returns into the state. Does not communicate by itself.

    Sharded models are parts of cycles: those of the view before are collected at once, since they
    hold memory of devices, and threads of their groups.

    Args:
        state: whose objects are made anew.
        build: see steps().
        view: for build().
        keep: the new objects take over what the old ones held; else they keep what they have.

    Raises:
        ElasticError: a new object did not take the state of the old one.
    """
    if _replace(state, build, view, keep):
        gc.collect()


def _replace(state: State, build: Callable[[View], object], view: View, keep: bool) -> bool:
    """Whether there are sharded objects among those that were made anew."""
    old = dict(state.objects)
    held = {name: _Held.of(encoded) for name, encoded in state.encode().items()} if keep else {}
    forget_meshes()
    made = build(view)
    if isinstance(made, Mapping):
        state.put(**made)
    anew = [name for name, value in old.items() if state.objects[name] is not value]
    for name in held.keys() & set(anew):
        leaves = Leaves.of(state).updated(held[name].tensors, held[name].wholes)
        load(state, name, held[name].data, leaves)
    return any(state.encode_one(name).shards for name in anew)


@dataclass(frozen=True)
class _Held:
    """What an object held, without its mesh: no operation of DTensor may see that one again.

    Attributes:
        data: the encoded object.
        tensors: by path; of sharded ones the part that is here.
        wholes: what the sharded ones are like as wholes.
    """

    data: bytes
    tensors: dict[str, torch.Tensor]
    wholes: dict[str, TensorMeta]

    @classmethod
    def of(cls, encoded: Encoded) -> _Held:
        parts = {path: local_of(tensor) for path, tensor in encoded.shards.items()}
        wholes = {path: TensorMeta.of(tensor) for path, tensor in encoded.shards.items()}
        return cls(encoded.data, {**encoded.tensors, **parts}, wholes)
