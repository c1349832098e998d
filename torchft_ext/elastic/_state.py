"""The objects that all members hold alike, and how far they are."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from torchft_ext.elastic._codec import Encoded, encode
from torchft_ext.elastic._fingerprint import fingerprints
from torchft_ext.elastic._refusal import Refusal
from torchft_ext.elastic._sampler import BatchSampler
from torchft_ext.elastic._shards import is_shard, local_of

__all__ = ["NO_LINEAGE", "State"]

NO_LINEAGE = bytes(16)
# Some ten times what members on unlike processors were apart after 100,000 steps of AdamW and SGD;
# docs/reference/elastic.md has the figures.
DRIFT = 5e-5


@runtime_checkable
class Replicated(Protocol):
    """What a state is made of."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> object: ...


@dataclass
class Standing:
    """What one membership of this process makes of its state.

    Attributes:
        member: its id; whoever joins again has another one.
        founder: it is a member since the job's founding: its state may be the job's first.
        synced: it has taken part in a sync that ended.
        replica: the number of the replica that it was in then; -1: in none.
        shard: of the shard that it holds since then; -1: of none.
    """

    member: str = ""
    founder: bool = False
    synced: bool = False
    replica: int = -1
    shard: int = -1


class State:
    """The replicated objects of a job, and the number of steps that they have gone through.

    The user makes and owns it, one for each job; steps() moves it. After a failed sync, or update
    functions that failed half-way, it is *dirty*: it must be taken from another member. Threads:
    one at a time. It never communicates.

    Buffers of modules (running statistics) may differ between members, as DDP's own rule has it:
    sync() gives everyone the source's. Of sharded tensors (DTensor) each member holds its part. All
    else must be bit-identical on all members.

    Attributes:
        step: how many steps are committed. Set it, before the first view, to what a checkpoint
            says.
        lineage: 16 bytes; of the job in which they were committed; zeros: of none yet.
        dirty: the objects may be a mixture of two steps.
        allow_pickle: enums, and leaves that cannot be sent otherwise, travel by pickle, which
            trusts all members.
        drift: how far floats of a tensor may be apart, relative to its norm, on members that have
            committed the same steps with equal gradients: processors round differently. The
            source's count then.
    """

    def __init__(
        self,
        *objects: object,
        allow_pickle: bool = False,
        drift: float = DRIFT,
        **named: object,
    ) -> None:
        """Name the objects.

        Args:
            objects: modules, optimizers, schedulers, GradScaler, BatchSampler, anything that has
                state_dict() and load_state_dict(); a tensor, a list or dict of tensors, which are
                written in place. The first module is called "model", the first optimizer
                "optimizer", others by their class in lower case; further ones with a number.
            allow_pickle: see the attribute.
            drift: see the attribute; 0 refuses every difference.
            named: the same with names of your own.

        Raises:
            TypeError: an object has no state.
            ValueError: two objects have one name, or `drift` is negative.
        """
        if not drift >= 0.0:
            raise ValueError(f"State: drift: expected 0 or more, found {drift}")
        self.step = 0
        self.lineage = NO_LINEAGE
        self.dirty = False
        self.allow_pickle = allow_pickle
        self.drift = drift
        self.standing = Standing()
        self._objects: dict[str, Replicated] = {}
        self._entry: _Entry | None = None
        self._refusal = Refusal()
        for value in objects:
            self._add(_name_of(value, self._objects), value)
        for name, value in named.items():
            self._add(name, value)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the objects, in the order in which they are loaded."""
        return tuple(self._objects)

    @property
    def objects(self) -> Mapping[str, Replicated]:
        """By name."""
        return self._objects

    def replace(self, **named: object) -> None:
        """Put other objects in the place of those of these names, such as a model wrapped anew.

        Raises:
            KeyError: there is no object of this name.
            TypeError: an object has no state.
        """
        for name, value in named.items():
            if name not in self._objects:
                raise KeyError(f"State.replace: {name!r}: expected one of {self.names}")
            self._objects[name] = _with_state(name, value)

    def put(self, **named: object) -> None:
        """Add objects, or put them in the place of those of these names.

        Raises:
            TypeError: an object has no state.
        """
        for name, value in named.items():
            self._objects[name] = _with_state(name, value)

    def clear_gradients(self) -> None:
        """Set the gradients of all modules and optimizers to None."""
        for value in self._objects.values():
            if isinstance(value, nn.Module | torch.optim.Optimizer):
                value.zero_grad(set_to_none=True)

    def snapshot(self) -> None:
        """Keep what a step changes before it is committed: buffers, and the loss scaler's scale."""
        self._entry = _Entry(self._modules(), self._scalers())

    def restore(self) -> None:
        """Set that back to what the last snapshot() has; without one, do nothing."""
        if self._entry is not None:
            self._entry.restore()

    def restore_modes(self) -> None:
        """Set modules to train() or eval() as they were at the last snapshot(); without one, do
        nothing.
        """
        if self._entry is not None:
            self._entry.restore_modes()

    def follow(self, rank: int, size: int) -> None:
        """Let samplers take the part of this rank of a world of this size."""
        for sampler in self._samplers():
            sampler.follow(rank, size)

    def commit(self) -> None:
        """Count one step more, and move the samplers on."""
        self.step += 1
        for sampler in self._samplers():
            sampler.commit()

    def check(self) -> None:
        """Refuse what could not be sent at the next change of members; quick, see Refusal.

        With `allow_pickle` all types of values can be sent, and nothing is refused.

        Raises:
            TypeError: a value is of such a type; the message says where, what, and what is taken.
        """
        if not self.allow_pickle:
            self._refusal.check(self._objects)

    @property
    def sampler(self) -> BatchSampler | None:
        """The only BatchSampler of the state; None: there is none, or more than one."""
        samplers = list(self._samplers())
        return samplers[0] if len(samplers) == 1 else None

    def check_batches(self) -> None:
        """Refuse to commit a step that took some of its batches; see BatchSampler.check_given()."""
        for sampler in self._samplers():
            sampler.check_given()

    def rewind(self) -> None:
        """Let samplers give the batch of the same step again."""
        for sampler in self._samplers():
            sampler.rewind()

    def fingerprints(self) -> dict[str, bytes]:
        """Hash every leaf; blocks until devices have done so.

        Returns:
            16 bytes for each path, such as ``"model/fc.weight"`` or ``"optimizer/state[0]/step"``.

        Raises:
            TypeError: a leaf is of a type that cannot be sent.
        """
        parts = list(self.encode().values())
        shards = {path: local_of(tensor) for part in parts for path, tensor in part.shards.items()}
        hashed = zip(shards, fingerprints(shards.values()), strict=True)
        return {**hash_leaves(parts), **dict(hashed)}

    def digest(self) -> str:
        """Return one hash of everything, in hex: equal on two members whose state is equal.

        Of sharded tensors the part here is in it: it is equal along the replicas of one shard.
        Buffers are in it too, which may differ between members.
        """
        whole = hashlib.blake2b(digest_size=16)
        for path, value in sorted(self.fingerprints().items()):
            whole.update(path.encode() + b"\0" + value)
        return whole.hexdigest()

    def state_dict(self, *, to_load: bool = False) -> dict[str, Any]:
        """Return step, lineage and the states of all objects, for a checkpoint.

        Args:
            to_load: for torch.distributed.checkpoint.load(), which reads what it finds in the dict,
                and nothing else: optimizers that have made no step have no state to be found. Here
                they have what their first step would make, while they stay as they are.
        """
        parts = {
            name: _with_first_state(value) if to_load else value.state_dict()
            for name, value in self._objects.items()
        }
        return {"step": self.step, "lineage": self.lineage, "objects": parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take step and objects from a checkpoint, before the first view.

        Raises:
            KeyError: an object is missing there.
        """
        for name, value in self._objects.items():
            value.load_state_dict(state_dict["objects"][name])
        self.step = int(state_dict["step"])
        self.lineage = bytes(state_dict["lineage"])
        self.dirty = False

    def encode(self) -> dict[str, Encoded]:
        """Encode the state of every object, by name.

        Raises:
            TypeError: a leaf is of a type that cannot be sent.
        """
        return {name: self.encode_one(name) for name in self._objects}

    def encode_one(self, name: str) -> Encoded:
        """Encode the state of one object; the same errors."""
        tree = self._objects[name].state_dict()
        return encode(tree, name, allow_pickle=self.allow_pickle)

    def load(self, name: str, tree: Any) -> None:
        """Let the object take this state; optimizers take tensors in the dtypes that they have."""
        value = self._objects[name]
        if isinstance(tree, OrderedDict):  # the versions of modules, which stand beside the leaves
            tree._metadata = getattr(value.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
        value.load_state_dict(tree)
        if isinstance(value, torch.optim.Optimizer):
            _undo_casts(value, tree)

    def free_paths(self) -> frozenset[str]:
        """Return the paths of leaves that may differ between members: buffers of modules."""
        return frozenset(
            f"{name}/{buffer}"
            for name, value in self._objects.items()
            if isinstance(value, nn.Module)
            for buffer, _ in value.named_buffers(remove_duplicate=False)
        )

    def _add(self, name: str, value: object) -> None:
        if name in self._objects:
            raise ValueError(f"State: two objects are called {name!r}")
        self._objects[name] = _with_state(name, value)

    def _modules(self) -> Iterator[nn.Module]:
        return (value for value in self._objects.values() if isinstance(value, nn.Module))

    def _samplers(self) -> Iterator[BatchSampler]:
        return (value for value in self._objects.values() if isinstance(value, BatchSampler))

    def _scalers(self) -> Iterator[torch.amp.GradScaler]:
        values = self._objects.values()
        return (value for value in values if isinstance(value, torch.amp.GradScaler))


class _Entry:
    """Copies of what a step changes before it is committed, made when the step begins."""

    def __init__(
        self, modules: Iterator[nn.Module], scalers: Iterator[torch.amp.GradScaler]
    ) -> None:
        owners = [owner for module in modules for owner in module.modules()]
        self._modes = [(owner, owner.training) for owner in owners]
        self._buffers = [
            (owner, name, None if buffer is None else buffer.detach().clone())
            for owner in owners
            for name, buffer in owner._buffers.items()
        ]
        self._scalers = [(scaler, _scale_of(scaler)) for scaler in scalers]

    @torch.no_grad()
    def restore(self) -> None:
        for owner, name, saved in self._buffers:
            now = owner._buffers[name]
            if saved is None or now is None or now.shape != saved.shape:
                owner._buffers[name] = None if saved is None else saved.clone()
            else:
                now.copy_(saved)
        for scaler, scale in self._scalers:
            _set_scale(scaler, scale)

    def restore_modes(self) -> None:
        for owner, training in self._modes:
            owner.training = training


def _scale_of(scaler: torch.amp.GradScaler) -> list[torch.Tensor | None]:
    """Scale and growth counter, without waiting for the device; None before their first use."""
    kept = (getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None))
    return [None if tensor is None else tensor.clone() for tensor in kept]


def _set_scale(scaler: torch.amp.GradScaler, saved: list[torch.Tensor | None]) -> None:
    """As GradScaler.update() leaves it: optimizers are to be unscaled anew (torch/amp)."""
    for name, tensor in zip(("_scale", "_growth_tracker"), saved, strict=True):
        setattr(scaler, name, None if tensor is None else tensor.clone())
    scaler._per_optimizer_states.clear()


def _with_first_state(value: Replicated) -> Any:
    """The object's state, of an optimizer without one that which its first step makes."""
    if not isinstance(value, torch.optim.Optimizer) or value.state:
        return value.state_dict()
    groups = value.param_groups
    parameters = [one for group in groups for one in group["params"] if one.requires_grad]
    gradients = [one.grad for one in parameters]
    rates = [group.get("lr") for group in groups]
    try:
        for group, rate in zip(groups, rates, strict=True):
            if rate is not None:  # some optimizers change parameters whose gradients are zero
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        value.step()
    finally:
        for group, rate in zip(groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        first = value.state_dict()
        value.state.clear()
    return first


def _undo_casts(optimizer: torch.optim.Optimizer, tree: Any) -> None:
    """Put tensors into its state that load_state_dict() has cast to the dtype of their parameter,
    or moved to its device.

    Moments may have another dtype on purpose, and NAdam and ASGD have float32 scalars for every
    parameter. Source: Optimizer._process_value_according_to_param_policy().
    """
    if not isinstance(tree, dict) or not {"state", "param_groups"} <= tree.keys():
        return  # of an optimizer with a state_dict() of its own
    numbers = [number for group in tree["param_groups"] for number in group["params"]]
    params = [one for group in optimizer.param_groups for one in group["params"]]
    keys: dict[Any, Any] = dict(zip(numbers, params, strict=False))
    for number, given in tree["state"].items():
        key = keys.get(number, number)
        if key in optimizer.state:
            optimizer.state[key] = _as_given(optimizer.state[key], given)


def _as_given(taken: Any, given: Any) -> Any:
    """What was taken, but with given tensors that were cast or moved."""
    if isinstance(taken, torch.Tensor) and isinstance(given, torch.Tensor):
        if taken.device.type != given.device.type:
            return given
        return taken if taken.dtype == given.dtype else given.to(taken.device)
    if isinstance(taken, dict) and isinstance(given, dict):
        for key in taken.keys() & given.keys():
            taken[key] = _as_given(taken[key], given[key])
        return taken
    if type(taken) in (list, tuple) and type(given) is type(taken) and len(taken) == len(given):
        return type(taken)(_as_given(*pair) for pair in zip(taken, given, strict=True))
    return taken


class _Tensors:
    """A tensor, or a list or dict of tensors, as an object with a state."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self._tensors.items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        if state_dict.keys() != self._tensors.keys():
            raise ValueError(
                f"expected tensors {sorted(self._tensors)}, found {sorted(state_dict)}"
            )
        for name, tensor in self._tensors.items():
            tensor.copy_(state_dict[name])


def memory_of(value: object) -> list[torch.Tensor]:
    """Return tensors whose memory an object's state is, as far as that is known."""
    if isinstance(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        return [local_of(tensor) if is_shard(tensor) else tensor for tensor in tensors]
    return list(bare_tensors(value).values())


def bare_tensors(value: object) -> Mapping[str, torch.Tensor]:
    """Return the tensors that were given to State() as such, by their keys; else none."""
    return value.state_dict() if isinstance(value, _Tensors) else {}


def hash_leaves(parts: Sequence[Encoded]) -> dict[str, bytes]:
    """Return 16 bytes for each leaf of these trees that is not sharded, by path."""
    tensors = {path: tensor for part in parts for path, tensor in part.tensors.items()}
    hashes = dict(zip(tensors, fingerprints(tensors.values()), strict=True))
    for part in parts:
        for path, value in part.values.items():
            hashes[path] = hashlib.blake2b(value, digest_size=16).digest()
    return hashes


def _with_state(name: str, value: object) -> Replicated:
    if isinstance(value, torch.Tensor):
        return _Tensors({"tensor": value})
    if isinstance(value, list | tuple) and all(isinstance(t, torch.Tensor) for t in value):
        return _Tensors({str(index): tensor for index, tensor in enumerate(value)})
    if isinstance(value, dict) and all(isinstance(t, torch.Tensor) for t in value.values()):
        return _Tensors(value)
    if isinstance(value, Replicated):
        return value
    raise TypeError(
        f"State: {name}: expected an object with state_dict() and load_state_dict(), or tensors, "
        f"found {type(value).__qualname__}"
    )


def _name_of(value: object, taken: Mapping[str, object]) -> str:
    if isinstance(value, nn.Module):
        name = "model"
    elif isinstance(value, torch.optim.Optimizer):
        name = "optimizer"
    elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        name = "scheduler"
    else:
        name = type(value).__name__.lower()
    further = (f"{name}{number}" for number in range(2, len(taken) + 3))
    return next(free for free in (name, *further) if free not in taken)
