"""State dicts as bytes: an explicit encoding, equal for equal states, that runs no code.

A tree is what state_dict() returns. Its leaves are tensors and plain values; the bytes hold the
values, and of tensors what they are like. A leaf's path is its keys, joined: ``state[0]/exp_avg``.
A sharded tensor is described as a whole, so that the bytes are the same on all shards. A value of a
subclass has the bytes of the plain value that it equals.
"""

from __future__ import annotations

import pickle
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch

from torchft_ext.elastic._plain import FACTORIES, narrow_float, number_of, plain
from torchft_ext.elastic._shards import check_shard, is_shard, placements_of

__all__ = ["Encoded", "TensorMeta", "decode", "encode", "join"]

_SIZE = struct.Struct("<q")
_FLOAT = struct.Struct("<d")
_ATOMS = {b"N": None, b"F": False, b"Y": True}


@dataclass(frozen=True)
class TensorMeta:
    """What a tensor is like, without its values.

    Attributes:
        dtype: as str() of it says, such as ``"torch.float32"``.
        shape: its sizes.
        device: the device's type, such as ``"cpu"``.
        placements: how a sharded tensor is cut, such as ``"(Replicate(), Shard(dim=0))"``; its
            shape is that of the whole. Empty for others.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str
    placements: str = ""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """Describe a tensor; a sharded one as a whole."""
        placements = placements_of(tensor) if is_shard(tensor) else ""
        return cls(str(tensor.dtype), tuple(tensor.shape), tensor.device.type, placements)

    def torch_dtype(self) -> torch.dtype:
        """Return the dtype that the name says."""
        found = getattr(torch, self.dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"this torch has no {self.dtype}")
        return found

    def nbytes(self) -> int:
        """Return the size of the values in bytes."""
        return prod(self.shape) * self.torch_dtype().itemsize


@dataclass(frozen=True)
class Encoded:
    """A tree as bytes, and its leaves.

    Attributes:
        data: the same for trees of equal structure, values and kinds of tensors.
        tensors: by path, in the order of the tree; not copies.
        shards: the sharded ones (DTensor), which are not among `tensors`; not copies.
        values: the encoding of every other leaf, by path.
    """

    data: bytes
    tensors: dict[str, torch.Tensor]
    shards: dict[str, torch.Tensor]
    values: dict[str, bytes]


def join(path: str, key: object) -> str:
    """Return the path of what stands under this key."""
    return f"{path}/{key}" if isinstance(key, str) else f"{path}[{key!r}]"


def encode(
    tree: object,
    path: str,
    *,
    allow_pickle: bool = False,
    join: Callable[[str, object], str] = join,
) -> Encoded:
    """Encode None, bool, int, float, str, bytes, list, tuple, dict and tensors among them.

    Keys of a dict are sorted, those of an OrderedDict keep their order. These come back with their
    types, and so do Counter, defaultdict with one of the factories of Python's own types, and
    float16 and float32 of numpy, whose arithmetic is another one than Python's. Other subclasses
    and other scalars of numpy come back as the plain values that they equal: numpy.float64 as
    float, IntEnum as int, namedtuple and torch.Size as tuple.

    Args:
        tree: what to encode.
        path: the name of its root, with which all paths begin.
        allow_pickle: encode enums and other leaves by pickle; only for states that come from
            processes trusted to run any code here.
        join: makes the path of what stands under a key.

    Raises:
        TypeError: a leaf is of another type, or a tensor is sparse, quantized, a sum that is not
            reduced yet (DTensor's Partial) or without memory; the message names its path.
        ValueError: two leaves have one path.
    """
    encoder = _Encoder(allow_pickle, join)
    encoder.add(path, tree)
    return Encoded(bytes(encoder.out), encoder.tensors, encoder.shards, encoder.values)


def decode(
    data: bytes,
    path: str,
    leaf: Callable[[str, TensorMeta], object],
    *,
    allow_pickle: bool = False,
) -> Any:
    """Build the tree again.

    Args:
        data: of encode().
        path: the name of its root.
        leaf: what stands in the place of a tensor; called in the order of the tree.
        allow_pickle: run what pickled leaves say.

    Raises:
        ValueError: these are not the bytes of a tree.
        TypeError: a leaf is pickled, and `allow_pickle` is False.
    """
    decoder = _Decoder(data, leaf, allow_pickle)
    tree = decoder.take(path)
    if decoder.at != len(data):
        raise ValueError(f"{path}: {len(data) - decoder.at} bytes follow the state")
    return tree


class _Encoder:
    """Walks a tree once."""

    def __init__(self, allow_pickle: bool, join: Callable[[str, object], str]) -> None:
        self.out = bytearray()
        self.tensors: dict[str, torch.Tensor] = {}
        self.shards: dict[str, torch.Tensor] = {}
        self.values: dict[str, bytes] = {}
        self._allow_pickle = allow_pickle
        self._join = join

    def add(self, path: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(path, value)
        elif isinstance(value, list | tuple) and not isinstance(value, Enum):
            self._add_sequence(path, value)
        elif isinstance(value, dict) and _has_known_factory(value):
            self._add_dict(path, value)
        else:
            self._claim(path)
            self.values[path] = encode_leaf(path, value, self._allow_pickle)
            self.out += self.values[path]

    def _claim(self, path: str) -> None:
        if any(path in leaves for leaves in (self.tensors, self.shards, self.values)):
            raise ValueError(f"two leaves of the state have the path {path!r}")

    def _add_tensor(self, path: str, tensor: torch.Tensor) -> None:
        _check_dense(path, tensor)
        self._claim(path)
        meta = TensorMeta.of(tensor)
        (self.shards if meta.placements else self.tensors)[path] = tensor
        self.out += b"D" + _text(meta.placements) if meta.placements else b"T"
        self.out += _text(meta.dtype) + _text(meta.device) + _SIZE.pack(len(meta.shape))
        self.out += b"".join(map(_SIZE.pack, meta.shape))

    def _add_sequence(self, path: str, items: list[object] | tuple[object, ...]) -> None:
        self.out += (b"l" if isinstance(items, list) else b"t") + _SIZE.pack(len(items))
        for index, item in enumerate(items):
            self.add(self._join(path, index), item)

    def _add_dict(self, path: str, items: dict[object, object]) -> None:
        entries = [(encode_key(path, key), key) for key in items]
        if not isinstance(items, OrderedDict):
            entries.sort(key=lambda entry: entry[0])
        self.out += _kind_of(items) + _SIZE.pack(len(items))
        for data, key in entries:
            self.out += data
            self.add(self._join(path, plain(key)), items[key])


def _has_known_factory(items: dict[object, object]) -> bool:
    return not isinstance(items, defaultdict) or items.default_factory in FACTORIES.values()


def _kind_of(items: dict[object, object]) -> bytes:
    if isinstance(items, defaultdict):
        names = [name for name, one in FACTORIES.items() if one is items.default_factory]
        return b"e" + _text(names[0])
    return b"o" if isinstance(items, OrderedDict) else b"c" if isinstance(items, Counter) else b"d"


def encode_key(path: str, key: object) -> bytes:
    """Encode a dict's key: a plain value or a tuple of them."""
    if isinstance(key, tuple) and not isinstance(key, Enum):
        parts = [encode_key(path, part) for part in key]
        return b"t" + _SIZE.pack(len(parts)) + b"".join(parts)
    return encode_leaf(f"{path}: the key {key!r}", key, allow_pickle=False)


def encode_leaf(path: str, value: object, allow_pickle: bool = False) -> bytes:
    """Encode a plain value that is neither a tensor nor a collection; raises as encode()."""
    if allow_pickle and isinstance(value, Enum):
        return b"p" + _block(pickle.dumps(value))
    narrow = narrow_float(value)
    if narrow is not None:
        return b"n" + _text(narrow[0]) + _block(narrow[1])
    same = plain(value)
    kind = type(same)
    if same is None or isinstance(same, bool):
        return b"N" if same is None else b"Y" if same else b"F"
    if kind is int:
        return b"i" + _block(str(same).encode())
    if kind is float:
        return b"f" + _FLOAT.pack(same)
    if kind is str:
        return b"s" + _text(same)  # type: ignore[arg-type]
    if kind is bytes:
        return b"b" + _block(same)  # type: ignore[arg-type]
    if allow_pickle:
        return b"p" + _block(pickle.dumps(value))
    raise TypeError(
        f"{path}: a state has None, bool, int, float, str, bytes, lists, tuples, dicts, tensors, "
        f"and numpy's real scalars, found {_described(value)}; convert it, or name "
        "allow_pickle=True"
    )


def _described(value: object) -> str:
    """The type, of a defaultdict with its factory."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"{name} of {value.default_factory}" if isinstance(value, defaultdict) else name


def _check_dense(path: str, tensor: torch.Tensor) -> None:
    """Refuse what is not plain memory of this process."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"{path}: expected a dense tensor, found {tensor.layout} {tensor.dtype}")
    if tensor.is_meta:
        raise TypeError(f"{path}: expected a tensor with values, found one on the meta device")
    if is_shard(tensor):
        check_shard(path, tensor)


def _block(data: bytes) -> bytes:
    return _SIZE.pack(len(data)) + data


def _text(text: str) -> bytes:
    return _block(text.encode("utf-8", "surrogatepass"))


class _Decoder:
    """Reads an encoded tree once, from its front."""

    def __init__(
        self, data: bytes, leaf: Callable[[str, TensorMeta], object], allow_pickle: bool
    ) -> None:
        self.at = 0
        self._data = data
        self._leaf = leaf
        self._allow_pickle = allow_pickle

    def take(self, path: str) -> Any:
        kind = self._bytes(1)
        if kind in _ATOMS:
            return _ATOMS[kind]
        readers: dict[bytes, Callable[[str], object]] = {
            b"T": self._tensor,
            b"D": lambda path: self._tensor(path, self._text()),
            b"l": self._list,
            b"t": lambda path: tuple(self._list(path)),
            b"d": lambda path: dict(self._entries(path)),
            b"o": lambda path: OrderedDict(self._entries(path)),
            b"c": lambda path: Counter(dict(self._entries(path))),
            b"e": self._defaultdict,
            b"n": lambda path: number_of(path, self._text(), self._block()),
            b"i": lambda _: int(self._block()),
            b"f": lambda _: _FLOAT.unpack(self._bytes(8))[0],
            b"s": lambda _: self._text(),
            b"b": lambda _: self._block(),
            b"p": self._pickled,
        }
        if kind not in readers:
            raise ValueError(f"{path}: these are not the bytes of a state")
        return readers[kind](path)

    def _tensor(self, path: str, placements: str = "") -> object:
        dtype, device = self._text(), self._text()
        shape = tuple(self._number() for _ in range(self._number()))
        return self._leaf(path, TensorMeta(dtype, shape, device, placements))

    def _list(self, path: str) -> list[Any]:
        return [self.take(join(path, index)) for index in range(self._number())]

    def _entries(self, path: str) -> Iterator[tuple[Any, Any]]:
        for _ in range(self._number()):
            key = self.take(path)
            yield key, self.take(join(path, key))

    def _defaultdict(self, path: str) -> object:
        name = self._text()
        if name not in FACTORIES:
            raise ValueError(f"{path}: these are not the bytes of a state")
        return defaultdict(FACTORIES[name], self._entries(path))

    def _pickled(self, path: str) -> object:
        data = self._block()
        if not self._allow_pickle:
            raise TypeError(f"{path}: the source pickled it, and allow_pickle is not set here")
        return pickle.loads(data)

    def _text(self) -> str:
        return self._block().decode("utf-8", "surrogatepass")

    def _block(self) -> bytes:
        return self._bytes(self._number())

    def _number(self) -> int:
        number: int = _SIZE.unpack(self._bytes(8))[0]
        return number

    def _bytes(self, count: int) -> bytes:
        end = self.at + count
        if not self.at <= end <= len(self._data):
            raise ValueError(f"the state ends {end - len(self._data)} bytes too early")
        taken = self._data[self.at : end]
        self.at = end
        return taken
