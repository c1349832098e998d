"""Collectives of torch that autograd runs backward: torch.distributed.nn.functional, and those of
functional collectives whose names end in "autograd".

Their backward is a collective too, in the group's generation at that time. In a later generation it
would add gradients of other members' steps, without an error. So it raises.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch._compile import _disable_dynamo
from torch.distributed import distributed_c10d as c10d

from torchft_ext._groups import backend
from torchft_ext.errors import CommAbortedError

MODULE = "torch.distributed.nn.functional"
FUNCTIONAL = "torch.distributed._functional_collectives"
# The classes of `MODULE` behind its functions. They are patched, and not the functions: a program
# may have the functions already, and these look their class's methods up in each call.
_CLASSES = {
    "_AllGather": "all_gather",
    "_AllGatherBase": "_all_gather_base",
    "_AllReduce": "all_reduce",
    "_AlltoAll": "all_to_all",
    "_AlltoAllSingle": "all_to_all_single",
    "_Broadcast": "broadcast",
    "_Gather": "gather",
    "_Reduce": "reduce",
    "_Reduce_Scatter": "reduce_scatter",
    "_Scatter": "scatter",
}
_Began = list[tuple[Any, int]]  # handles, and their generations when the forward began


def methods() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return what stands around the methods of the classes of `MODULE`, which has been imported."""
    module = sys.modules[MODULE]
    return [
        (getattr(module, each), method, functools.partial(ours, name))
        for each, name in _CLASSES.items()
        if hasattr(module, each)
        for method, ours in (("forward", _forward), ("backward", _backward))
    ]


def functional_collectives() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the same of the functions of `FUNCTIONAL`."""
    module = sys.modules[FUNCTIONAL]
    found: list[tuple[Any, str, Callable[..., Any]]] = []
    for name, value in vars(module).items():
        if inspect.isfunction(value) and name.endswith("_autograd") and not name.startswith("_"):
            parameters = inspect.signature(value)
            if "group" in parameters.parameters:
                found.append((module, name, functools.partial(_functional, name, parameters)))
    return found


def _forward(_name: str, theirs: Callable[..., Any], ctx: Any, *args: Any) -> Any:
    if torch.compiler.is_compiling():
        return theirs(ctx, *args)
    ctx._torchft_ext_began = _began_in(args)
    return theirs(ctx, *args)


def _backward(name: str, theirs: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
    if not torch.compiler.is_compiling():
        _check(name, getattr(ctx, "_torchft_ext_began", []))
    return theirs(ctx, *gradients)


def _functional(
    name: str,
    parameters: inspect.Signature,
    theirs: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if torch.compiler.is_compiling():
        return theirs(*args, **kwargs)
    began = _began_in_named(parameters, args, kwargs)
    results = theirs(*args, **kwargs)
    for node in {one.grad_fn for one in _tensors_in(results) if one.grad_fn is not None}:
        node.register_prehook(lambda _gradients: _check(name, began))
    return results


# Dynamo is kept from these: after a graph break it compiles each frame for itself, and cannot
# compile what looks into groups.


@_disable_dynamo
def _began_in(args: tuple[Any, ...]) -> _Began:
    """Return the generation of the group among these arguments, else of the default one."""
    groups = [one for one in args if isinstance(one, dist.ProcessGroup)]
    return _generations_of(groups[0] if groups else c10d.GroupMember.WORLD)


@_disable_dynamo
def _began_in_named(
    parameters: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Began:
    """Return the generation of a functional collective's group."""
    try:
        given = parameters.bind(*args, **kwargs).arguments
    except TypeError:
        return []  # torch says what is wrong
    return _generations_of(_group_of(given["group"], given.get("tag", "")))


@_disable_dynamo
def _check(name: str, began: _Began) -> None:
    for handle, generation in began:
        if handle.generation != generation:
            raise CommAbortedError(
                f"backward of {name} on '{handle.group_name}': its forward ran in generation "
                f"{generation}, this is generation {handle.generation}; run forward() again, and "
                "backward() after it",
                generation=generation,
                op=name,
            )


def _generations_of(group: object) -> _Began:
    """Return none for a group of another library."""
    if not isinstance(group, dist.ProcessGroup):
        return []
    try:
        handle: Any = backend(group)
    except ValueError:
        return []
    return [(handle, handle.generation)]


def _group_of(value: Any, tag: str) -> Any:
    """Return the group that functional collectives take for `value`; None: there is none."""
    try:
        if isinstance(value, list):
            value = c10d._resolve_group_name_by_ranks_and_tag(value, tag)
        if isinstance(value, str):
            name: Any = value
            return _c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, TypeError):
        return None  # torch says what is wrong
    if isinstance(value, tuple) and len(value) == 2 and hasattr(value[0], "get_group"):
        return value[0].get_group(value[1])
    return value.get_group() if hasattr(value, "get_group") else value


def _tensors_in(results: Any) -> Iterator[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        yield results
    elif isinstance(results, (list, tuple)):
        for one in results:
            yield from _tensors_in(one)
