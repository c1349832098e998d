"""The names "ft", "ft:host" ... in torch.distributed, and what makes a group of them."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from datetime import timedelta
from types import FrameType
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from torchft_ext import _C
from torchft_ext._backends import backends_of
from torchft_ext._group_made import group_made
from torchft_ext_names import ENGINES, gloo, replaces_gloo

_CREATOR = "_new_process_group_helper"
_ENGINES = ("ft", *ENGINES)


class _CreationOptions(Protocol):
    """What torch hands to an extended creator (c10d::DistributedBackendOptions)."""

    store: Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


def create(
    opts: _CreationOptions, pg_options: object, *, name: str, backend_name: str = "ft"
) -> dist.ProcessGroup | Backend:
    """Make what `init_process_group(name)` asks for; called by torch.

    Returns a group whose rank and size follow the generation where `name` is its only backend, else
    a plain backend. Blocks until the first generation stands, up to the timeout.

    Raises:
        CommError: the first generation could not be formed.
        NotImplementedError: there is no such engine, or none for this process's devices.
        ValueError, TypeError: bad options, or a spec that torch cannot serve.
    """
    frame = _creators_frame()
    spec = _spec(frame)
    if _disabled():
        return _plain(opts, _chosen_timeout(opts, pg_options), name, frame)
    caller = _caller(frame)
    if replaces_gloo(c10d) and isinstance(pg_options, gloo(c10d)._Options):
        pg_options = None  # of gloo's devices and threads
    try:
        options = _options(pg_options, f"{caller}('{name}')")
        timeout = _positive(_given_timeout(opts, frame), caller)
        _refuse_two_of_ours(spec, caller)
    except (TypeError, ValueError) as error:
        if not getattr(opts, "enable_reconfigure", False):
            _C._publish_failed_init(opts.store, opts.group_rank, opts.group_size, str(error))
        raise
    single = spec is not None and len(set(spec.values())) == 1
    if _engine(name) not in _ENGINES:
        return _over_another_backend(opts, options, timeout, name, single)
    made = _C._create_backend(
        opts.store,
        opts.group_rank,
        opts.group_size,
        timeout=timeout,
        engine=_engine(name),
        name=opts.group_id,
        options=options,
        may_resize=single,
        begin=not getattr(opts, "enable_reconfigure", False),
        bound_device=_bound_device(frame),
        beside=_default_backend(),
        ranks_beside=list(opts.global_ranks_in_group),
        backend_name=backend_name,
    )
    try:
        group_made()
        if not single or spec is None:
            _mend_default_backend(frame, spec)
            return made
        group = _C._create_group(opts.store, made, list(spec))
        _copy_bound_device(frame, group)
    except BaseException:  # Ctrl-C; a traceback may keep it
        made.abort(f"{caller} was interrupted")
        raise
    return group


_made_in_place_of_gloo = itertools.count()


def backend_in_place_of_gloo(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta | object = timedelta(minutes=30),
    options: object = None,
) -> Backend:
    """Make what ``ProcessGroupGloo(store, rank, size, timeout)`` asks for, where it is replaced.

    Args:
        store: as torch's.
        rank: as torch's.
        size: as torch's.
        timeout: of operations; or torch's options of gloo, which have one.
        options: the same, by name.

    Raises:
        CommError: the generation could not be formed.
    """
    given = options if options is not None else timeout
    limit = given if isinstance(given, timedelta) else getattr(given, "_timeout", None)
    return _in_place_of_gloo(store, rank, size, limit, may_resize=False)


def group_in_place_of_gloo(
    store: Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a group that torch's tables do not know; its rank and size follow the generation.

    Raises:
        CommError: the generation could not be formed.
    """
    made = _in_place_of_gloo(store, rank, size, timeout, may_resize=True)
    return _C._create_group(store, made, ["cpu"])


def _in_place_of_gloo(
    store: Store, rank: int, size: int, timeout: timedelta | None, *, may_resize: bool
) -> _C.Backend:
    return _C._create_backend(
        store,
        rank,
        size,
        timeout=timeout,
        engine="host",
        name=f"gloo/{next(_made_in_place_of_gloo)}",
        options=None,
        may_resize=may_resize,
        begin=True,
        beside=_default_backend(),
        backend_name="gloo",
    )


def _over_another_backend(
    opts: _CreationOptions,
    options: _C.Options | None,
    timeout: timedelta,
    name: str,
    single: bool,
) -> dist.ProcessGroup:
    """Make a group over a backend of torch's or of the program's: "ft:gloo".

    Raises:
        ValueError: it is to be one of several backends of a group, or was not declared.
        NotImplementedError: it cannot be made anew.
    """
    guards_place = dist.PrefixStore("guard", opts.store)
    group = None
    try:
        from torchft_ext._pg_backend import ProcessGroupBackend  # only now: not needed before

        if not single:
            raise ValueError(
                f"'{name}': expected it as a group's only backend, found it in a spec with others; "
                "use 'ft:host' there"
            )
        chosen = timeout if options is None or options.timeout is None else options.timeout
        group = ProcessGroupBackend(_engine(name), chosen, options=options)
        group.begin_over(opts.store, guards_place, opts.group_rank, opts.group_size)
    except BaseException as error:  # Ctrl-C, too: the first import takes long enough for one
        if group is not None and group.has_met:
            group.abort()  # even where it had begun
        else:
            interrupted = not isinstance(error, Exception)
            why = "it was interrupted" if interrupted else str(error) or type(error).__name__
            _C._publish_failed_init(guards_place, opts.group_rank, opts.group_size, why)
        raise
    return group


def _default_backend() -> _C.Backend | None:
    """Return ours of the default group; None where it has none, or is being made itself."""
    group = c10d.GroupMember.WORLD
    return next(backends_of(group), None) if group is not None else None


def _options(pg_options: object, call: str) -> _C.Options | None:
    if pg_options is None or isinstance(pg_options, _C.Options):
        return pg_options
    raise TypeError(
        f"{call}: pg_options: expected torchft_ext.Options, found {type(pg_options).__name__}"
    )


def _given_timeout(opts: _CreationOptions, frame: FrameType | None) -> timedelta:
    """Return the timeout as torch was given it; the one that it hands on has overflowed if long."""
    given = frame.f_locals.get("timeout") if frame is not None else None
    return given if isinstance(given, timedelta) else opts.timeout


def _positive(timeout: timedelta, caller: str) -> timedelta:
    """Refuse it where it is not; torch hands on whatever it was given."""
    if timeout <= timedelta(0):
        found = timeout / timedelta(milliseconds=1)
        raise ValueError(f"{caller}: timeout: expected a positive time, found {found:g} ms")
    return timeout


def _engine(name: str) -> str:
    """Return "ft" for "ft", "host" for "ft:host" and "ft_host"."""
    return name[3:] or "ft"


def _creators_frame() -> FrameType | None:
    """Return the frame of torch's function that called the creator; None where it is not there."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _CREATOR:
        frame = frame.f_back
    return frame


def _caller(frame: FrameType | None) -> str:
    """Name the function of torch.distributed that was called, which errors begin with."""
    by = frame.f_back if frame is not None else None
    first = by is None or by.f_code.co_name == "init_process_group"
    return "init_process_group" if first else "new_group"


def _spec(frame: FrameType | None) -> dict[str, str] | None:
    """Return {device: backend} of the group being made; None where it cannot be read.

    The creator is told nothing of it, so it is read from torch's own local variable.
    """
    config = frame.f_locals.get("backend_config") if frame is not None else None
    if not isinstance(config, c10d.BackendConfig):
        return None
    return {device: str(value) for device, value in config.get_device_backend_map().items()}


def _refuse_two_of_ours(spec: dict[str, str] | None, caller: str) -> None:
    ours = {
        value for value in (spec or {}).values() if value == "ft" or value[:3] in ("ft:", "ft_")
    }
    if len(ours) > 1:
        raise ValueError(
            f"{caller}: expected one backend of torchft_ext in a spec, found "
            f"{sorted(ours)}: torch would serve both devices with the first of them; write 'ft', "
            "which is one backend for all devices"
        )


def _mend_default_backend(frame: FrameType | None, spec: dict[str, str] | None) -> None:
    """Make ours the default backend of a group for which torch found none, or one it has not."""
    group = frame.f_locals.get("pg") if frame is not None else None
    if isinstance(group, dist.ProcessGroup) and group.name() not in (spec or {}).values():
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)


def _bound_device(frame: FrameType | None) -> str | None:
    """Return the device given as device_id=, of which the creator is not told."""
    group = frame.f_locals.get("pg") if frame is not None else None
    device = group.bound_device_id if isinstance(group, dist.ProcessGroup) else None
    if device is None and frame is not None:
        device = frame.f_locals.get("device_id")
    return None if device is None else str(device)


def _copy_bound_device(frame: FrameType | None, group: dist.ProcessGroup) -> None:
    """Carry over what torch noted on the group that ours takes the place of."""
    device = _bound_device(frame)
    if device is not None:
        group.bound_device_id = torch.device(device)


def _disabled() -> bool:
    value = os.environ.get("TORCHFT_EXT_DISABLE", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"TORCHFT_EXT_DISABLE: expected '0' or '1', found '{value}'")
    return value == "1"


_warned = False


def _chosen_timeout(opts: _CreationOptions, pg_options: object) -> timedelta:
    chosen = pg_options.timeout if isinstance(pg_options, _C.Options) else None
    return opts.timeout if chosen is None else chosen


def _plain(
    opts: _CreationOptions, timeout: timedelta, name: str, frame: FrameType | None
) -> dist.ProcessGroup | Backend:
    """Make what torch itself would use in place of `name` (TORCHFT_EXT_DISABLE=1)."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"TORCHFT_EXT_DISABLE=1: '{name}' is plain gloo (CPU) and nccl (CUDA), "
            "without fault tolerance",
            stacklevel=2,
        )
    spec = _spec(frame)
    has_nccl = dist.is_nccl_available() and torch.cuda.is_available()
    if spec is not None and len(set(spec.values())) > 1:
        device = cast(FrameType, frame).f_locals.get("device", "cpu")
        # Without CUDA nobody has a tensor for its half, which torch wants all the same.
        return _plain_backend(opts, timeout, device if has_nccl else "cpu")
    devices = list(spec or {"cpu": name})
    if devices == ["cuda"] and not has_nccl:
        raise RuntimeError(
            f"TORCHFT_EXT_DISABLE=1: '{name}' would be plain nccl, and this torch has none or "
            "sees no CUDA device; use 'ft' or 'gloo'"
        )
    group = dist.ProcessGroup(opts.store, opts.group_rank, opts.group_size)
    types = dist.ProcessGroup.BackendType
    for device in devices:
        if device != "cuda":
            made = _plain_backend(opts, timeout, device)
            group._register_backend(torch.device(device), types.GLOO, made)
            group._set_default_backend(types.GLOO)
        elif has_nccl:
            made = _plain_backend(opts, timeout, device)
            group._register_backend(torch.device(device), types.NCCL, made)
            group._set_default_backend(types.NCCL)
    return group


def _plain_backend(opts: _CreationOptions, timeout: timedelta, device: str) -> Backend:
    store = PrefixStore(f"plain_{device}", opts.store)
    if device != "cuda":
        made: Backend = gloo(c10d)(store, opts.group_rank, opts.group_size, timeout=timeout)
        return made
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, opts.group_rank, opts.group_size, options)
