"""Encodings of plain values that are looked at in every step, and seldom change."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

import torch

from torchft_ext.elastic._codec import encode, encode_leaf

__all__ = ["WatchedValues"]

_NOT_VALUES = frozenset({"params", "param_names"})  # of an optimizer's group
_LEAVES = frozenset({type(None), bool, int, float, str})


class WatchedValues:
    """The values of one mapping, such as a group of an optimizer.

    Where neither the keys nor the objects under them have changed, nothing is encoded and no path
    is written: a look costs a microsecond. Threads: one at a time.

    Attributes:
        encoded: by path, in the order of the keys. A group that was loaded has another order than
            a new one, so keys are sorted. Empty bytes: it cannot be encoded, as Refusal says.
        tensors: those among the values, likewise.
    """

    def __init__(self, form: str) -> None:
        """Form: of a path, with {} where the key stands."""
        self._form = form
        self._keys: tuple[str, ...] = ()
        self._seen: tuple[object, ...] = ()
        # Of what can change in its place: the items, where these cannot; None: looked at each time.
        self._items: dict[str, tuple[object, ...] | None] = {}
        self._paths: dict[str, str] = {}
        self.encoded: dict[str, bytes] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def look(self, values: Mapping[str, object]) -> None:
        """Bring the attributes up to date."""
        keys, seen = tuple(values), tuple(values.values())
        if keys != self._keys:
            self._begin(values)
        elif self._items or not all(map(is_, seen, self._seen)):
            self._follow(values, seen)
        self._keys, self._seen = keys, seen

    def _begin(self, values: Mapping[str, object]) -> None:
        keys = [key for key in sorted(values) if key not in _NOT_VALUES]
        self._paths = {key: self._form.format(key) for key in keys}
        self._items, self.encoded, self.tensors = {}, {}, {}
        for key in keys:
            self._put(key, values[key])

    def _follow(self, values: Mapping[str, object], seen: tuple[object, ...]) -> None:
        for key, before, now in zip(self._keys, self._seen, seen, strict=True):
            if key not in self._paths or (now is before and not self._may_differ(key, now)):
                continue
            if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor):
                self._begin(values)
                return
            self._put(key, now)

    def _may_differ(self, key: str, value: Any) -> bool:
        if key not in self._items:
            return False
        items = self._items[key]
        return items is None or len(items) != len(value) or not all(map(is_, items, value))

    def _put(self, key: str, value: object) -> None:
        path = self._paths[key]
        if isinstance(value, torch.Tensor):
            self.tensors[path] = value
            return
        self.encoded[path] = _encoded(path, value)
        self._items.pop(key, None)
        if isinstance(value, list | tuple) and all(type(one) in _LEAVES for one in value):
            if type(value) is not tuple:
                self._items[key] = tuple(value)
        elif type(value) not in _LEAVES:
            self._items[key] = None


def _encoded(path: str, value: object) -> bytes:
    try:
        return encode_leaf(path, value) if type(value) in _LEAVES else encode(value, path).data
    except (TypeError, ValueError):  # Refusal says so
        return b""
