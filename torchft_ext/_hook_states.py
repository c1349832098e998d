"""The states of torch's communication hooks for DDP, which are reset in each generation.

A hook's state counts steps, and keeps tensors and random numbers that must be the same on all
members. A newcomer has others. This package resets the states of the hooks that it knows, and
leaves others unchanged. A user's own hook must either keep nothing from step to step that members
must have in common, or give its state a method `begin_generation()`. That method is called on every
member before its first step in a generation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
# Of PowerSGD's random numbers, PowerSGDState's own default: members need the same, and which one a
# state was given is not kept.
_SEED = 0


def begin_anew(state: Any, hook: Callable[..., Any]) -> None:
    """Put what a hook keeps to where that of every other member is put. Does not block.

    That includes what a backward() that failed has left in it.
    """
    _begin_own(state)
    if _is(state, "powerSGD_hook", "PowerSGDState"):
        _begin_power_sgd(state)
    elif _is(state, "post_localSGD_hook", "PostLocalSGDState"):
        state.iter = 0
    elif _is(state, "mixed_precision_hooks", "_AllreduceUpcastHookState"):
        state.wait_for_stream_enqueued = False
    in_backward = getattr(hook, "keywords", {}).get("optim_stream_state")
    if in_backward is not None:
        in_backward.wait_for_optim_stream_enqueued = False


def begin_registered(state: Any) -> None:
    """Put a state that is registered in the midst of a generation to where older ones were put.

    Its random numbers, that is: whoever restores one with steps behind it does so on all members.
    """
    _begin_own(state)
    if _is(state, "powerSGD_hook", "PowerSGDState") and state.iter == 0:
        state.rng.seed(_SEED)


def _begin_own(state: object) -> None:
    begin = getattr(state, "begin_generation", None)
    if callable(begin):
        begin()


def _is(state: object, module: str, name: str) -> bool:
    # Not imported for this: who has such a state has its module.
    kind = getattr(sys.modules.get(f"{_HOOKS}.{module}"), name, None)
    return kind is not None and isinstance(state, kind)


def _begin_power_sgd(state: Any) -> None:
    state.iter = 0
    state.rng.seed(_SEED)
    for tensors in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
        tensors.clear()
