"""Objects of a state take leaves that came from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchft_ext.elastic._codec import Encoded, TensorMeta, decode
from torchft_ext.elastic._errors import ElasticError
from torchft_ext.elastic._shards import dress
from torchft_ext.elastic._state import State

__all__ = ["Leaves", "load", "tensor_paths"]


@dataclass(frozen=True)
class Leaves:
    """Tensors of a state, by path.

    Attributes:
        tensors: those that are not sharded.
        shards: the sharded ones.
    """

    tensors: dict[str, torch.Tensor]
    shards: dict[str, torch.Tensor]

    @classmethod
    def of(cls, state: State) -> Leaves:
        """Those of all objects; not copies."""
        return cls.among(state.encode())

    @classmethod
    def among(cls, encoded: Mapping[str, Encoded]) -> Leaves:
        """Those of these objects; not copies."""
        parts = encoded.values()
        return cls(
            {path: tensor for part in parts for path, tensor in part.tensors.items()},
            {path: tensor for part in parts for path, tensor in part.shards.items()},
        )

    def updated(
        self, taken: Mapping[str, torch.Tensor], wholes: Mapping[str, TensorMeta]
    ) -> Leaves:
        """Those of this process with others in their place.

        Args:
            taken: tensors, and parts of sharded ones.
            wholes: what the sharded ones are like as wholes.
        """
        shards = dict(self.shards)
        for path in taken.keys() & wholes.keys():
            whole = wholes[path]
            shards[path] = dress(taken[path], whole.shape, whole.placements, self.shards.values())
        return Leaves({**self.tensors, **taken}, shards)


def tensor_paths(name: str, data: bytes, allow_pickle: bool) -> list[str]:
    """Return the paths of all tensors of one encoded object."""
    metas: dict[str, TensorMeta] = {}
    decode(data, name, metas.__setitem__, allow_pickle=allow_pickle)
    return list(metas)


def load(state: State, name: str, data: bytes, leaves: Leaves) -> None:
    """Let an object take a state, and see that it did.

    Args:
        state: whose object it is.
        name: the object's.
        data: the encoded state.
        leaves: tensors for all of its paths.

    Raises:
        ElasticError: it holds another state than that now.
    """

    def leaf(path: str, meta: TensorMeta) -> torch.Tensor:
        return (leaves.shards if meta.placements else leaves.tensors)[path]

    tree: Any = decode(data, name, leaf, allow_pickle=state.allow_pickle)
    state.load(name, tree)
    if state.encode_one(name).data != data:
        raise ElasticError(f"sync: {name}: load_state_dict() did not take the state whole")
