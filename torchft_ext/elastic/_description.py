"""One member's state without its tensors' values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NoReturn

import torch

from torchft_ext.elastic._codec import Encoded, TensorMeta, decode, encode
from torchft_ext.elastic._fingerprint import fingerprints
from torchft_ext.elastic._shards import local_of
from torchft_ext.elastic._state import hash_leaves

__all__ = ["Description", "ShardList"]


@dataclass(frozen=True)
class Description:
    """The structure of a state, its plain values, what its tensors are like, and leaves' hashes.

    Attributes:
        parts: the encoded objects by name.
        metas: of all tensors that are not sharded, by path; the source's order is that of all.
        wholes: of all sharded tensors, as wholes, by path; the source's order is that of all.
        hashes: of all leaves that are not sharded, by path; empty bytes where none was needed.
        payload: all of it in bytes; equal for equal states.
    """

    parts: dict[str, bytes]
    metas: dict[str, TensorMeta]
    wholes: dict[str, TensorMeta]
    hashes: dict[str, bytes]
    payload: bytes

    @classmethod
    def of(cls, encoded: Mapping[str, Encoded], *, hashed: bool) -> Description:
        """Describe a state; blocks until devices have hashed it.

        Args:
            encoded: its objects by name.
            hashed: False: the leaves' values are not compared with anybody's.
        """
        parts = {name: part.data for name, part in encoded.items()}
        leaves = [path for part in encoded.values() for path in (*part.tensors, *part.values)]
        hashes = hash_leaves(list(encoded.values())) if hashed else dict.fromkeys(leaves, b"")
        payload = encode([list(parts.items()), list(hashes.items())], "payload").data
        tensors = {path: t for part in encoded.values() for path, t in part.tensors.items()}
        shards = {path: t for part in encoded.values() for path, t in part.shards.items()}
        return cls(parts, _metas_of(tensors), _metas_of(shards), hashes, payload)

    @classmethod
    def unpack(cls, payload: bytes, *, allow_pickle: bool) -> Description:
        """Return the description that these bytes hold.

        Raises:
            ValueError: they hold none.
            TypeError: a leaf is pickled, and `allow_pickle` is False.
        """
        parts, hashes = decode(payload, "payload", _no_tensor)
        found: dict[str, TensorMeta] = {}
        for name, data in parts:
            decode(data, name, found.__setitem__, allow_pickle=allow_pickle)
        metas = {path: meta for path, meta in found.items() if not meta.placements}
        wholes = {path: meta for path, meta in found.items() if meta.placements}
        return cls(dict(parts), metas, wholes, dict(hashes), payload)

    def digest(self) -> bytes:
        """Return 16 bytes that are equal for equal states."""
        return blake2b(self.payload, digest_size=16).digest()

    def places(self) -> list[str]:
        """Return what a member may differ in: paths of leaves, then names of objects."""
        return [*self.hashes, *self.parts]

    def differences(self, other: Description) -> list[bool]:
        """Say for each of another one's places() whether this state lacks it as it is there."""
        leaves = [
            not value or self.hashes.get(path) != value or self._kind(path) != other._kind(path)
            for path, value in other.hashes.items()
        ]
        return leaves + [self.parts[name] != data for name, data in other.parts.items()]

    def _kind(self, path: str) -> TensorMeta | None:
        return self.metas.get(path)


@dataclass(frozen=True)
class ShardList:
    """One member's part of each sharded tensor, without the values.

    Attributes:
        metas: what the parts are like, by path; the source's order is that of all.
        hashes: of the parts, by path; empty bytes where none was needed.
        payload: all of it in bytes; equal for equal parts.
    """

    metas: dict[str, TensorMeta]
    hashes: dict[str, bytes]
    payload: bytes

    @classmethod
    def of(cls, encoded: Mapping[str, Encoded], *, hashed: bool) -> ShardList:
        """Describe the parts that are here; blocks until devices have hashed them."""
        parts = {p: local_of(t) for one in encoded.values() for p, t in one.shards.items()}
        values = fingerprints(parts.values()) if hashed else [b""] * len(parts)
        hashes = dict(zip(parts, values, strict=True))
        metas = _metas_of(parts)
        rows = [[p, m.dtype, list(m.shape), m.device, hashes[p]] for p, m in metas.items()]
        return cls(metas, hashes, encode(rows, "shards").data)

    @classmethod
    def unpack(cls, payload: bytes) -> ShardList:
        """Return the list that these bytes hold.

        Raises:
            ValueError: they hold none.
        """
        rows = decode(payload, "shards", _no_tensor)
        metas = {row[0]: TensorMeta(row[1], tuple(row[2]), row[3]) for row in rows}
        return cls(metas, {row[0]: row[4] for row in rows}, payload)

    def digest(self) -> bytes:
        """Return 16 bytes that are equal for equal parts."""
        return blake2b(self.payload, digest_size=16).digest()

    def differences(self, other: ShardList) -> list[bool]:
        """Say for each of another one's paths whether this member lacks the part as it is there."""
        return [
            not value or self.hashes.get(path) != value or self.metas.get(path) != other.metas[path]
            for path, value in other.hashes.items()
        ]


def _metas_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorMeta]:
    return {path: TensorMeta.of(tensor) for path, tensor in tensors.items()}


def _no_tensor(path: str, _: TensorMeta) -> NoReturn:
    raise ValueError(f"{path}: a description has no tensors")
