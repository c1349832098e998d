"""Finds at a commit what could not be encoded at the next change of members."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from itertools import chain
from time import monotonic

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchft_ext.elastic._codec import encode, encode_key
from torchft_ext.elastic._sampler import BatchSampler
from torchft_ext.elastic._shards import is_shard

__all__ = ["Refusal"]

_TENSORS = (torch.Tensor, nn.Parameter)
_LEAVES = frozenset({type(None), bool, int, float, str, bytes, *_TENSORS})
_KEYS = frozenset({bool, int, float, str})
_MAPPINGS = (dict, OrderedDict, Counter)
_CHEAP_S = 50e-6  # a user's object that takes longer is looked at less often,
_PART = 0.01  # so that it takes this part of the time


class Refusal:
    """Looks at the plain values of a state, and refuses those of types that cannot be encoded.

    It reads what can have changed: groups and state of optimizers, state_dict() of schedulers,
    samplers and other objects, the extra state of modules. Tensors of optimizers are looked at when
    entries come or go. Parameters, buffers and the loss scaler have no other values. It copies
    nothing and does not wait for devices, unless a user's state_dict() does. Owner: a State.
    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}  # entries of an optimizer's state
        self._extra: dict[str, tuple[nn.Module, list[tuple[str, nn.Module]]]] = {}
        self._due: dict[str, float] = {}  # objects that take long, and when each is looked at again

    def check(self, objects: Mapping[str, object]) -> None:
        """Raise where a value cannot be encoded.

        Args:
            objects: by name.

        Raises:
            TypeError: the message names the path in Python's words, as
                ``optimizer.param_groups[0]['lr']``.
        """
        for name, value in objects.items():
            if isinstance(value, Optimizer) and _has_torchs_state(value):
                self._check_optimizer(name, value)
            elif isinstance(value, LRScheduler | BatchSampler):
                _check_tree(name, value.state_dict())
            elif not isinstance(value, torch.amp.GradScaler):
                self._check_now_and_then(name, value)

    def _check_now_and_then(self, name: str, value: object) -> None:
        began = monotonic()
        if began < self._due.get(name, 0.0):
            return
        if isinstance(value, nn.Module):
            self._check_module(name, value)
        else:
            _check_tree(name, value.state_dict())  # type: ignore[attr-defined]
        now = monotonic()
        if now - began > _CHEAP_S:
            self._due[name] = now + (now - began) / _PART

    def _check_optimizer(self, name: str, optimizer: Optimizer) -> None:
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and not _is_plain(value):
                    _check(f"{name}.param_groups[{number}][{key!r}]", value)
        entries = optimizer.state.values()
        try:
            counts = list(map(len, entries))
            leaves = chain.from_iterable(map(dict.values, entries))  # no loop of Python's
            is_known = counts == self._counts.get(name) and _LEAVES.issuperset(map(type, leaves))
        except TypeError:  # something beside the dicts of parameters
            counts, is_known = [], False
        if not is_known:
            _check_state(name, optimizer)
            self._counts[name] = counts

    def _check_module(self, name: str, module: nn.Module) -> None:
        known, extra = self._extra.get(name, (None, []))
        if known is not module:
            extra = [(path, one) for path, one in module.named_modules() if _has_extra_state(one)]
            self._extra[name] = (module, extra)
        for path, one in extra:
            value = one.get_extra_state()
            if not _is_plain(value):
                _check(f"{name}.{path}".rstrip(".") + ".get_extra_state()", value)


def _check_state(name: str, optimizer: Optimizer) -> None:
    """All of it, also tensors and keys, by the numbers that parameters have in state_dict()."""
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    numbers = {id(one): number for number, one in enumerate(params)}
    for key, entry in optimizer.state.items():
        if isinstance(entry, dict) and all(map(_is_dense, entry.values())) and _has_texts(entry):
            continue
        _check(f"{name}.state[{numbers.get(id(key), key)!r}]", entry)


def _has_texts(entry: dict[object, object]) -> bool:
    return set(map(type, entry)) == {str}


def _is_dense(value: object) -> bool:
    """A plain leaf, or a tensor of this process's memory."""
    if not isinstance(value, torch.Tensor):
        return type(value) in _LEAVES
    usual = value.layout is torch.strided and not value.is_quantized and not value.is_meta
    return usual and not is_shard(value)


def _has_torchs_state(optimizer: Optimizer) -> bool:
    """Its state_dict() is torch's: groups and state as they stand."""
    return type(optimizer).state_dict is Optimizer.state_dict


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _check_tree(name: str, tree: object) -> None:
    """What an object's state_dict() returns: most objects give their attributes."""
    if _is_plain(tree):
        return
    if not isinstance(tree, dict):
        return _check(name, tree)
    for key, value in tree.items():
        encode_key(name, key)
        named = isinstance(key, str) and key.isidentifier()
        if not _is_plain(value):
            _check(f"{name}.{key}" if named else _under(name, key), value)


def _is_plain(value: object) -> bool:
    """Quickly: nothing in it has to be looked at closer."""
    kind = type(value)
    if kind in _LEAVES:
        return True
    if kind in (list, tuple):
        items: list[object] = value  # type: ignore[assignment]
        return _LEAVES.issuperset(map(type, items)) or all(map(_is_plain, items))
    if kind in _MAPPINGS:
        tree: dict[object, object] = value  # type: ignore[assignment]
        return _KEYS.issuperset(map(type, tree)) and all(map(_is_plain, tree.values()))
    return False


def _check(path: str, value: object) -> None:
    encode(value, path, join=_under)


def _under(path: str, key: object) -> str:
    return f"{path}[{key!r}]"
