"""Collectives of torch that autograd runs backward: torch.distributed.nn.functional, and those of
functional collectives whose names end in "autograd".

Their backward is a collective too, in the group as it is then. In a later generation it would add
gradients of other members' steps, and say nothing. So it raises.
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
from torch.distributed import distributed_c10d as c10d

from torchft_ext._groups import backend
from torchft_ext.errors import CommAbortedError

MODULE = "torch.distributed.nn.functional"
FUNCTIONAL = "torch.distributed._functional_collectives"
_NAMES = (
    "_all_gather_base",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)
_ELSEWHERE = "torch.distributed.nn"  # it copies the names of `MODULE`


def functions() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return what stands around the functions of `MODULE`, once that has been imported."""
    modules = [sys.modules[name] for name in (MODULE, _ELSEWHERE) if name in sys.modules]
    return [
        (module, name, functools.partial(_with_a_guard, name, True))
        for module in modules
        for name in _NAMES
        if hasattr(module, name)
    ]


def functional_collectives() -> list[tuple[Any, str, Callable[..., Any]]]:
    """The same of `FUNCTIONAL`."""
    module = sys.modules[FUNCTIONAL]
    return [
        (module, name, functools.partial(_with_a_guard, name, False))
        for name, value in vars(module).items()
        if inspect.isfunction(value) and name.endswith("_autograd") and not name.startswith("_")
    ]


def _with_a_guard(
    name: str, in_default: bool, theirs: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call torch's function; in_default: without a group it is in the default one."""
    if torch.compiler.is_compiling():
        return theirs(*args, **kwargs)
    handles = _handles_in((*args, *kwargs.values()), in_default)
    began = [(handle, handle.generation) for handle in handles]
    results = theirs(*args, **kwargs)
    for node in {one.grad_fn for one in _tensors_in(results) if one.grad_fn is not None}:
        node.register_prehook(functools.partial(_check, name, began))
    return results


def _check(name: str, began: list[tuple[Any, int]], _gradients: Any) -> None:
    for handle, generation in began:
        if handle.generation != generation:
            raise CommAbortedError(
                f"backward of {name} on '{handle.group_name}': its forward ran in generation "
                f"{generation}, this is generation {handle.generation}; run forward() again, and "
                "backward() after it",
                generation=generation,
                op=name,
            )


def _handles_in(given: tuple[Any, ...], in_default: bool) -> Iterator[Any]:
    """Yield the handle of the group among these arguments, else of the default one where that is
    meant; nothing for another library's."""
    named = [group for group in map(_group_of, given) if group is not None]
    for group in named or ([c10d.GroupMember.WORLD] if in_default else []):
        if not isinstance(group, dist.ProcessGroup):
            continue
        try:
            yield backend(group)
        except ValueError:
            continue


def _group_of(value: Any) -> Any:
    if isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, str):  # or a reduction's name
        try:
            name: Any = value
            return _c10d._resolve_process_group(name)
        except RuntimeError:
            return None
    if isinstance(value, tuple) and len(value) == 2 and hasattr(value[0], "get_group"):
        return value[0].get_group(value[1])
    return value.get_group() if hasattr(value, "get_group") else None


def _tensors_in(results: Any) -> Iterator[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        yield results
    elif isinstance(results, (list, tuple)):
        for one in results:
            yield from _tensors_in(one)
