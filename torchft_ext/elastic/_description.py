"""One member's state without its tensors' values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NoReturn

from torchft_ext.elastic._codec import Encoded, TensorMeta, decode, encode
from torchft_ext.elastic._state import hash_leaves

__all__ = ["Description"]


@dataclass(frozen=True)
class Description:
    """The structure of a state, its plain values, what its tensors are like, and leaves' hashes.

    Attributes:
        parts: the encoded objects by name.
        metas: of all tensors, by path; the source's order is that of all.
        hashes: of all leaves, by path; empty bytes where none was needed.
        payload: all of it in bytes; equal for equal states.
    """

    parts: dict[str, bytes]
    metas: dict[str, TensorMeta]
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
        metas = {path: TensorMeta.of(tensor) for path, tensor in tensors.items()}
        return cls(parts, metas, hashes, payload)

    @classmethod
    def unpack(cls, payload: bytes, *, allow_pickle: bool) -> Description:
        """Return the description that these bytes hold.

        Raises:
            ValueError: they hold none.
            TypeError: a leaf is pickled, and `allow_pickle` is False.
        """
        parts, hashes = decode(payload, "payload", _no_tensor)
        metas: dict[str, TensorMeta] = {}
        for name, data in parts:
            decode(data, name, metas.__setitem__, allow_pickle=allow_pickle)
        return cls(dict(parts), metas, dict(hashes), payload)

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


def _no_tensor(path: str, _: TensorMeta) -> NoReturn:
    raise ValueError(f"{path}: a description has no tensors")
