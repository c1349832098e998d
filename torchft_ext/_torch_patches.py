"""Where this package changes torch's own Python: what, in which versions, why, and until when.

Each patch replaces a function by one that calls it, and does for groups without a backend of this
package what torch does. They are made when the package is imported; a name that somebody took out
of torch's module before then stays torch's own. One patch stands elsewhere: the table of backend
names, which is needed before this package is imported (``torchft_ext_names.py``).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchft_ext import _C
from torchft_ext._configure_arguments import Membership
from torchft_ext._own_names import own_names

BackendsOf = Callable[[dist.ProcessGroup], Iterable[_C.Backend]]
Around = Callable[[], AbstractContextManager[None]]


def install(backends_of: BackendsOf) -> None:
    """Make the patches of torch.distributed; once, when the package is imported.

    Args:
        backends_of: gives this package's backends in a group.
    """
    _replace("_get_split_source", _find_split_source)
    if not hasattr(c10d, "set_timeout"):
        _replace("_set_pg_timeout", functools.partial(_set_pg_timeout, backends_of))
    _replace("monitored_barrier", functools.partial(_monitored_barrier, backends_of))
    recorder = functools.partial(_attach_flight_recorder, backends_of)
    _replace("_maybe_attach_flight_recorder", recorder)
    for method in (_configure, _errored):
        _add_method(method.__name__[1:], _OfOurGroups(backends_of, method))


def _replace(name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(c10d, name, None)
    if original is None or hasattr(original, "_torchft_ext"):
        return
    made: Any = functools.wraps(original)(make(original))
    made._torchft_ext = True
    for module in (c10d, dist):
        if getattr(module, name, None) is original:
            setattr(module, name, made)


# ---------------------------------------------------------------- torch.distributed


def _find_split_source(find: Callable[..., Any]) -> Any:
    """Keep torch from handing a backend of ours to its own nccl backend.

    Versions: those that have ``_get_split_source``, 2.11 to 2.15. Reason: torch takes the bound
    default group's backend for the parent of every new group's communicator if it can be split at
    all, whatever the new group's backend is. End: when torch asks for a parent of the same class.
    """

    def find_but_ours(*arguments: Any, **named: Any) -> Any:  # 2.15 gives the backend too
        found = find(*arguments, **named)
        return None if isinstance(found, _C.Backend) else found

    return find_but_ours


def _add_method(name: str, method: _OfOurGroups) -> None:
    """Give torch's ProcessGroup a method that it has not."""
    if not hasattr(dist.ProcessGroup, name) and name not in vars(dist.ProcessGroup):
        setattr(dist.ProcessGroup, name, method)


class _OfOurGroups:
    """A method of groups over a backend of ours, and of no others: hasattr() says so.

    Versions: all. Reason: such a group is of torch's own class, which batch_isend_irecv() and
    torch.compile ask for by identity; groups of torchft_ext.process_group, as 'ft:gloo' makes them,
    have configure() and errored(). End: when torch's class can be derived from.
    """

    def __init__(self, backends_of: BackendsOf, method: Callable[..., Any]) -> None:
        self._backends_of = backends_of
        self._method = method

    def __get__(self, group: dist.ProcessGroup | None, owner: type) -> Callable[..., Any]:
        name = self._method.__name__[1:]
        for backend in () if group is None else self._backends_of(group):
            return functools.partial(self._method, backend)
        raise AttributeError(f"'{owner.__name__}' object has no attribute '{name}'")


def _configure(backend: _C.Backend, store_addr: str, *args: object, **kwargs: object) -> None:
    """As configure() of torchft_ext.process_group's groups."""
    membership = Membership.of(args, kwargs)
    backend.configure(store_addr, membership.rank, membership.world_size)


def _errored(backend: _C.Backend) -> Exception | None:
    """As errored() of torchft_ext.process_group's groups."""
    return backend.errored()


def _attach_flight_recorder(backends_of: BackendsOf, attach: Callable[..., None]) -> Any:
    """Keep torch from recording groups of classes of ours that are written in Python.

    Versions: those that have ``_maybe_attach_flight_recorder``, from 2.15 on. Reason: it looks for
    the group's default backend, which such a group has not, and raises. End: when torch leaves out
    groups without a backend, as it does those without a device type.

    A backend that stands in gloo's place says its own name meanwhile: torch takes what is called
    gloo for a backend that records itself.
    """

    def attach_to_others(pg: dist.ProcessGroup, *arguments: Any, **named: Any) -> None:
        modules = {kind.__module__ for kind in type(pg).__mro__} - {_C.__name__}
        if any(module.startswith("torchft_ext.") for module in modules):
            return
        with own_names(backends_of(pg)):
            attach(pg, *arguments, **named)

    return attach_to_others


def _set_pg_timeout(backends_of: BackendsOf, set_theirs: Callable[..., None]) -> Any:
    """Let ``_set_pg_timeout()`` reach backends of ours, which it leaves out with a warning.

    Versions: before 2.14. Reason: it looks for the classes of gloo and NCCL. End: 2.14, whose
    ``set_timeout()`` asks every backend of the group.
    """

    def set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        chosen = c10d._get_default_group() if group is None else group
        ours = _ours(backends_of, chosen)
        for backend in ours:
            backend.set_timeout(timeout)
        if not ours or _has_others(chosen):
            set_theirs(timeout, group)

    return set_pg_timeout


def _monitored_barrier(backends_of: BackendsOf, theirs: Callable[..., None]) -> Any:
    """Let ``monitored_barrier()`` through to groups with a backend of ours and one for the CPU.

    Versions: all. Reason: before 2.14 it refuses all backends but gloo by name; later it takes
    torch's default limit for a group's own where it is given none. End: when torch does neither.
    """

    def monitored_barrier(
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        chosen: Any = c10d._get_default_group() if group is None else group
        if not _ours(backends_of, chosen) or torch.device("cpu") not in chosen._device_types:
            return theirs(group, timeout, wait_all_ranks)
        limit = {} if timeout is None else {"timeout": _checked(timeout)}
        chosen.monitored_barrier(wait_all_ranks=wait_all_ranks, **limit)

    return monitored_barrier


def _checked(timeout: object) -> timedelta:
    """Take a number for seconds, as torch does, with a warning; refuse what is no time."""
    if isinstance(timeout, float):
        warnings.warn(
            f"monitored_barrier: timeout: expected a timedelta, found {timeout}: taken for seconds",
            stacklevel=3,
        )
        timeout = timedelta(seconds=timeout)
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"monitored_barrier: timeout: expected a timedelta, found {type(timeout).__name__}"
        )
    return timeout


def _ours(backends_of: BackendsOf, group: object) -> list[_C.Backend]:
    """Return this package's backends; none where torch has a number for a group of others."""
    return list(backends_of(group)) if isinstance(group, dist.ProcessGroup) else []


def _has_others(group: dist.ProcessGroup) -> bool:
    for device in group._device_types:
        found = group._get_backend(device)
        if not isinstance(getattr(found, "wrapped_pg", found), _C.Backend):
            return True
    return False


# ---------------------------------------------------------------- futures


def futures() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return what stands around callbacks of torch's own futures, for `around()`.

    Versions: all. Reason: such a callback runs wherever its future is completed, inside one of our
    callbacks too, on one rank and not on another: what it issues must not be counted as that one's
    (``comm/callback_path.h``). End: when torch's futures say on which thread they run callbacks.
    """
    return [(torch._C.Future, name, _nameless) for name in ("then", "add_done_callback")]


def _nameless(theirs: Callable[..., Any], self: Any, callback: object) -> Any:
    if not callable(callback):
        return theirs(self, callback)
    return theirs(self, functools.partial(_C._call_nameless, callback))


# ---------------------------------------------------------------- what torch builds on groups


def around(functions: Iterable[tuple[Any, str, Callable[..., Any]]]) -> None:
    """Have functions of this package called in the place of torch's, which they are given first.

    DistributedDataParallel and its reducer (``_ddp.py``). Versions: all. Reason: a reducer keeps
    what it has learned of a generation, and torch has no way to make it anew. End: when torch's DDP
    can begin anew, and compares the layout of its buckets.

    ZeroRedundancyOptimizer (``_zero.py``). Versions: all. Reason: it trains on with the partition
    of another rank or size, silently. End: when torch refuses to, or partitions anew.

    Collectives that autograd runs backward (``_autograd.py``). Versions: all. Reason: their
    backward runs in whatever generation the group has then. End: when torch lets a group refuse a
    backward.
    """
    for owner, name, ours in functions:
        if not hasattr(getattr(owner, name), "_torchft_ext"):
            setattr(owner, name, _given_theirs(ours, getattr(owner, name)))


def around_in_eager(methods: Iterable[tuple[Any, str, Callable[..., Any]]]) -> None:
    """As around(), for static methods that C++ calls: torch.compile does not begin with a frame of
    ours there, since it would then compile torch's method too, which it leaves alone otherwise.
    """
    for owner, name, ours in methods:
        theirs = getattr(owner, name)
        if not hasattr(theirs, "_torchft_ext"):
            made: Any = _given_theirs_in_eager(ours, theirs)
            for each in (made, ours.func if isinstance(ours, functools.partial) else ours):
                _skip_code(each.__code__)
            setattr(owner, name, staticmethod(made))


def _given_theirs(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    call._torchft_ext = True  # type: ignore[attr-defined]
    return call


def _given_theirs_in_eager(
    ours: Callable[..., Any], theirs: Callable[..., Any]
) -> Callable[..., Any]:
    """As _given_theirs(), with code of its own, to be skipped."""

    @functools.wraps(theirs)
    def call_in_eager(*args: Any) -> Any:
        return ours(theirs, *args)

    call_in_eager._torchft_ext = True  # type: ignore[attr-defined]
    return call_in_eager


def _skip_code(code: CodeType) -> None:
    skip = getattr(getattr(torch._C._dynamo, "eval_frame", None), "skip_code", None)
    if skip is not None:
        skip(code)


# ---------------------------------------------------------------- torch.compile


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` once the module has been imported; now, where it has been.

    Versions: all. Reason: torch.compile's modules take seconds to import, so their patches wait
    until somebody else imports them. End: with those patches.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        # Only now: somebody may look for the module and not import it.
        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


def around_compilations(around: Around, behind: Callable[[Any], None]) -> bool:
    """Have torch.compile run each compilation in `around`, and call `behind` with its guards.

    Versions: all. Reason: it asks for ranks and sizes of groups when it compiles a function, makes
    constants of the answers, and guards none of them. End: when torch guards them, or lets a
    process group add guards of its own.

    Returns:
        False where torch compiles in a way that is not known here; then nothing is changed.
    """
    handler = _found("torch._dynamo.callback", "CompilationCallbackHandler")
    manager = _found("torch._dynamo.guards", "CheckFunctionManager")
    if not hasattr(handler, "install_callbacks") or manager is None:
        return False
    install_callbacks, initialise = handler.install_callbacks, manager.__init__

    @functools.wraps(install_callbacks)
    @contextmanager
    def installed(*args: Any, **kwargs: Any) -> Iterator[None]:
        with around(), install_callbacks(*args, **kwargs):
            yield

    @functools.wraps(initialise)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        behind(self.guard_manager)

    handler.install_callbacks = installed
    manager.__init__ = guarded
    return True


def around_log_records(around: Around) -> None:
    """Have torch's log write each record in `around`.

    Versions: all. Reason: it begins each line with the rank, and asks the default group for it in
    the middle of a compilation. End: with around_compilations().
    """
    formatter = _found("torch._logging._internal", "TorchLogsFormatter")
    if formatter is None:
        return
    original = formatter.format

    @functools.wraps(original)
    def format_aside(self: logging.Formatter, record: logging.LogRecord) -> str:
        with around():
            return str(original(self, record))

    formatter.format = format_aside


def _found(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
