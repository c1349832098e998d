"""DistributedDataParallel through changes of members: each generation begins with new reducers.

torch's reducer keeps what it has learned: the layout of its buckets (which it makes again after the
first backward), the divisor, and which parameters were unused. A newcomer's reducer has learned
nothing. So the first forward() in a generation makes a new reducer on every member. It does so
without a collective, because a newcomer may have no DDP object yet. Then all reducers learn
together.

Other differences are detected. An operation on a bucket carries a digest of the bucket's layout,
which members compare. It also carries the generation of its reducer, and fails in any other
generation (csrc/c10d/ddp/bucket_layouts.h). A backward() whose forward() ran in an older generation
raises.

Threads: a DDP object's forward() and backward() are not to run at the same time, as in torch.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel import distributed as ddp_module

from torchft_ext import _C, _hook_states
from torchft_ext._backends import backends_of
from torchft_ext._own_names import own_names
from torchft_ext.errors import Cause, CommAbortedError


@dataclass
class _Hooks:
    """What was registered with a DDP object, of whatever group."""

    python: list[tuple[object, Callable[..., Any]]] = field(default_factory=list)
    builtin: dist.BuiltinCommHookType | None = None


@dataclass
class _Wrapped:
    """What this package keeps of a DDP object whose group is its own."""

    arguments: tuple[Any, ...]  # of _ddp_init_helper
    group: dist.ProcessGroup
    backend: _C.Backend
    reducer: _C._DdpReducer
    complete: bool = True  # False: while a new reducer is being made, or where that failed
    before: dist.Reducer | None = None  # the last one, which a late autograd hook may still enter
    accumulates: bool = False  # the last forward() was one without synchronisation
    first_node: int = 0  # autograd's number of the first node that forward() made


_wrapped: weakref.WeakKeyDictionary[DDP, _Wrapped] = weakref.WeakKeyDictionary()
_hooks: weakref.WeakKeyDictionary[DDP, _Hooks] = weakref.WeakKeyDictionary()
_watched: weakref.WeakKeyDictionary[dist.Reducer, _C._DdpReducer] = weakref.WeakKeyDictionary()


def follow_generation(backend: _C.Backend) -> None:
    """Let the models of this backend's group begin as a newcomer's does.

    What a backward() that failed has left in them is undone.

    Now, and not with the next forward(): their state may be sent to newcomers before that.
    """
    for reference in list(_wrapped.keyrefs()):  # at once: other threads may make models meanwhile
        model = reference()
        wrapped = None if model is None else _wrapped.get(model)
        if model is None or wrapped is None or wrapped.backend is not backend:
            continue
        model.require_forward_param_sync = True  # as a newcomer's model has it
        if model.mixed_precision is not None:
            _restore_precision(model)


def _restore_precision(model: DDP) -> None:
    for parameter in model.module.parameters():
        full = getattr(parameter, "_fp_param", None)
        if full is not None:
            parameter.data = full
        hook = parameter.__dict__.pop("_ddp_mp_hook_state", None)
        if hook is not None:
            hook[1].remove()


def _watch_reducer(model: DDP, arguments: tuple[Any, ...]) -> None:
    """Have the new reducer of a DDP object watched, if the group is one of this package."""
    backend = next(backends_of(model.process_group), None)
    known = _wrapped.get(model)
    if backend is None:
        _wrapped.pop(model, None)
        return
    reducer = _C._DdpReducer(backend, model.reducer, backend.generation)
    _watched[model.reducer] = reducer
    if known is None:
        _wrapped[model] = _Wrapped(arguments, model.process_group, backend, reducer)
    else:
        known.arguments, known.reducer = arguments, reducer
        known.group, known.backend = model.process_group, backend
    reducer.read_layout()


@_disable_dynamo
def _follow(model: DDP) -> None:
    """Give a DDP object a new reducer if its group has begun a generation since it got its last."""
    wrapped = _wrapped.get(model)
    if wrapped is None:
        return
    current = wrapped.group is model.process_group and wrapped.complete
    if current and wrapped.reducer.why_stale() is None:
        if wrapped.before is not None:  # no backward() of its generation is under way any more
            wrapped.before._remove_autograd_hooks()
            wrapped.before = None
        return
    with torch.inference_mode(False), _all_trainable(wrapped.arguments[0]):
        _remake(model, wrapped)


@contextlib.contextmanager
def _all_trainable(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Have all of them require gradients: torch's reducer takes no others, which some now are."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _remake(model: DDP, wrapped: _Wrapped) -> None:
    last, accumulates = wrapped.reducer, wrapped.accumulates
    wrapped.complete = False
    last.retire()  # its buckets go before there are new ones
    if wrapped.before is None:
        wrapped.before = model.reducer
    model._ddp_init_helper(*wrapped.arguments)
    if model in _wrapped:  # else the group is another library's now
        wrapped.reducer.carry_over(last, accumulates)
    _configure_reducer(model)
    _register_hooks_again(model)
    model._has_rebuilt_buckets = False
    # A Join that is over leaves it on, and a newcomer's model has not been in one.
    model._join_config = _JoinConfig.construct_disabled_join_config()
    wrapped.complete = True


def _configure_reducer(model: DDP) -> None:
    """Tell the new reducer what DDP's constructor tells it after it has been made."""
    reducer: Any = model.reducer
    logger: Any = model.logger
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = False
        reducer._set_static_graph()
        logger._set_static_graph()
    if model.mixed_precision is not None:
        _restore_precision(model)
        reducer._set_mixed_precision_param_dtype(model.mixed_precision.param_dtype)
    if getattr(model, "_lazy_init_ran", False) and any(
        hasattr(parameter, "_in_backward_optimizers") for parameter in model._module_parameters
    ):
        reducer._set_optimizer_in_backward()
        for parameter in model._module_parameters:
            if hasattr(parameter, "_in_backward_optimizers"):
                parameter.grad = None  # as after each backward() that did not fail


def _register_hooks_again(model: DDP) -> None:
    hooks = _hooks.get(model, _Hooks())
    logger: Any = model.logger
    for state, hook in hooks.python:
        logger._set_comm_hook_name(hook.__qualname__)
        _hook_states.begin_anew(state, hook)
        dist._register_comm_hook(model.reducer, state, hook)
    if hooks.builtin is not None:
        logger._set_comm_hook_name(str(hooks.builtin))
        dist._register_builtin_comm_hook(model.reducer, hooks.builtin)


# ------------------------------------------------- a backward() of an older generation


def _nodes_of(value: object) -> tuple[Any, ...]:
    """Return the autograd nodes under the tensors in a structure, each once."""
    nodes: dict[Any, None] = {}
    for tensor in ddp_module._find_tensors(value):
        # What is done in place to a view gives it another node; that of its base stays below.
        for each in (tensor, tensor._base):
            if each is not None and each.grad_fn is not None:
                nodes[each.grad_fn] = None
    return tuple(nodes)


@_disable_dynamo
def _begin_forward(model: DDP) -> None:
    wrapped = _wrapped.get(model)
    if wrapped is not None:
        autograd: Any = torch.autograd
        wrapped.first_node = autograd._get_sequence_nr()
        wrapped.accumulates = not model.require_backward_grad_sync


@_disable_dynamo
def _guard_outputs(model: DDP, output: object) -> None:
    """Have the backward() of this output raise if another generation begins before it."""
    wrapped = _wrapped.get(model)
    if wrapped is None or not model.require_backward_grad_sync:
        return
    check = functools.partial(_refuse_old_backward, wrapped.backend, wrapped.reducer)
    for node in _nodes_of(output):
        if node._sequence_nr() >= wrapped.first_node:  # else it is the caller's
            node.register_prehook(check)


@_disable_dynamo
def _refuse_old_backward(backend: _C.Backend, reducer: _C._DdpReducer, _gradients: object) -> None:
    how = reducer.why_stale()
    if how is None:
        return
    raise CommAbortedError(
        f"backward of DistributedDataParallel on '{backend.group_name}': {how}; run forward() "
        "again",
        generation=reducer.generation(),
        cause=Cause(how=how),
        op="backward",
    )


# ---------------------------------------------------------------- in the place of torch's own

_ARGUMENTS = (  # of _ddp_init_helper
    "parameters",
    "expect_sparse_gradient",
    "param_to_name_mapping",
    "static_graph",
)


def functions() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return what stands around torch's functions: of which object, which one, and ours."""
    return [
        (DDP, "_ddp_init_helper", _init_helper),
        (DDP, "_pre_forward", _pre_forward),
        (DDP, "_post_forward", _post_forward),
        (DDP, "join_hook", _join_hook),
        (DDP, "_match_all_reduce_for_bwd_pass", _match_all_reduce_for_bwd_pass),
        (DDP, "_update_process_group", _update_process_group),
        (DDP, "register_comm_hook", _register_comm_hook),
        (DDP, "_register_builtin_comm_hook", _register_builtin_comm_hook),
        (dist, "_register_comm_hook", _register_on_reducer),
        (dist, "_register_builtin_comm_hook", _register_builtin_on_reducer),
        (dist.Reducer, "_rebuild_buckets", _rebuild_buckets),
        (dist.Reducer, "_run_comm_hook", _run_comm_hook),
        (dist.Reducer, "_set_mixed_precision_param_dtype", _set_mixed_precision_dtype),
    ]


def _init_helper(theirs: Callable[..., Any], self: DDP, *args: Any, **kwargs: Any) -> None:
    with own_names(backends_of(self.process_group)):  # of "gloo" torch's logger asks more
        theirs(self, *args, **kwargs)
    _watch_reducer(self, (*args, *(kwargs[name] for name in _ARGUMENTS[len(args) :])))


def _pre_forward(theirs: Callable[..., Any], self: DDP, *args: Any, **kwargs: Any) -> Any:
    trains = torch.is_grad_enabled() and not self._use_python_reducer
    if trains:
        _follow(self)
        _begin_forward(self)
    inputs = theirs(self, *args, **kwargs)
    if trains and self.require_backward_grad_sync:
        _compare_layouts(self)
    return inputs


def _post_forward(theirs: Callable[..., Any], self: DDP, output: object) -> object:
    output = theirs(self, output)
    if torch.is_grad_enabled() and not self._use_python_reducer:
        _guard_outputs(self, output)
    return output


@_disable_dynamo
def _compare_layouts(model: DDP) -> None:
    wrapped = _wrapped.get(model)
    if wrapped is not None:
        wrapped.reducer.compare_layouts()


def _match_all_reduce_for_bwd_pass(theirs: Callable[..., Any], self: DDP) -> None:
    _compare_layouts(self)  # what the forward() of ranks that still have inputs does
    theirs(self)


def _join_hook(theirs: Callable[..., Any], self: DDP, **kwargs: Any) -> Any:
    _follow(self)
    return theirs(self, **kwargs)


def _update_process_group(theirs: Callable[..., Any], self: DDP, group: dist.ProcessGroup) -> None:
    theirs(self, group)
    if self not in _wrapped:  # it was another library's group so far
        _watch_reducer(self, _arguments_of(self))
    _follow(self)


def _arguments_of(model: DDP) -> tuple[Any, ...]:
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    return parameters, sparse, names, model.static_graph


def _register_comm_hook(
    theirs: Callable[..., Any], self: DDP, state: object, hook: Callable[..., Any]
) -> None:
    theirs(self, state, hook)
    _hooks.setdefault(self, _Hooks()).python.append((state, hook))
    if self in _wrapped:
        _hook_states.begin_registered(state)


def _register_builtin_comm_hook(
    theirs: Callable[..., Any], self: DDP, comm_hook_type: dist.BuiltinCommHookType
) -> None:
    theirs(self, comm_hook_type)
    _hooks.setdefault(self, _Hooks()).builtin = comm_hook_type


def _register_on_reducer(
    theirs: Callable[..., Any], reducer: dist.Reducer, state: object, hook: Callable[..., Any]
) -> None:
    watched = _watched.get(reducer)
    if watched is None:
        theirs(reducer, state, hook)
    else:
        watched.register_hook(state, hook)


def _register_builtin_on_reducer(
    theirs: Callable[..., Any], reducer: dist.Reducer, comm_hook_type: dist.BuiltinCommHookType
) -> None:
    watched = _watched.get(reducer)
    if watched is None:
        theirs(reducer, comm_hook_type)
    else:
        watched.register_builtin_hook(comm_hook_type)


def _rebuild_buckets(theirs: Callable[..., Any], self: dist.Reducer) -> bool:
    rebuilt: bool = theirs(self)
    watched = _watched.get(self)
    if rebuilt and watched is not None:
        watched.read_layout()
    return rebuilt


def _set_mixed_precision_dtype(
    theirs: Callable[..., Any], self: dist.Reducer, dtype: torch.dtype
) -> None:
    theirs(self, dtype)
    watched = _watched.get(self)
    if watched is not None:
        watched.renew_views()


def _run_comm_hook(
    theirs: Callable[..., Any], self: dist.Reducer, bucket: dist.GradBucket
) -> torch.futures.Future[Any]:
    watched = _watched.get(self)
    made: torch.futures.Future[Any] = (
        theirs(self, bucket) if watched is None else watched.run_hook(bucket)
    )
    return made
