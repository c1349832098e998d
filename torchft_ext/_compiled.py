"""Guards for the numbers of an epoch that torch.compile makes constants of.

It asks for ``dist.get_rank()``, ``dist.get_world_size()`` and what functional collectives need when
it compiles a function, and guards none of the answers: after configure() with other numbers the
function would go on with the old ones. With these guards it is compiled anew.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchft_ext import _C

_COMPILER = "torch._dynamo.convert_frame"  # imports all that is marked below
_log = logging.getLogger("torchft_ext")
_watching = False
_epochs = 0  # that have begun by configure()


def watch() -> None:
    """Guard what is compiled from here on; called when the package is imported.

    torch.compile's own modules take seconds to import, so this waits until somebody else does.
    """
    global _watching
    if _watching:
        return
    _watching = True
    if _COMPILER in sys.modules:
        _mark()
    else:
        sys.meta_path.insert(0, _AfterImport())


def follow_epoch() -> None:
    """Have guards look again at ranks in groups that were not asked themselves."""
    global _epochs
    _epochs += 1


class _AfterImport(MetaPathFinder):
    """Calls _mark() once the module has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_mark(module: ModuleType) -> None:
            execute(module)
            _mark()

        spec.loader.exec_module = execute_and_mark  # type: ignore[method-assign]
        return spec


def _mark() -> None:
    handler = _found("torch._dynamo.callback", "CompilationCallbackHandler")
    manager = _found("torch._dynamo.guards", "CheckFunctionManager")
    if not hasattr(handler, "install_callbacks") or manager is None:
        _log.warning(
            "this torch compiles functions in a way that torchft_ext does not know: they may keep "
            "rank and size of an epoch that is over; call torch.compiler.reset() after configure()"
        )
        return
    _ask_for_compilations(handler)
    _guard_answers(manager)
    _leave_out_the_log()


def _found(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _ask_for_compilations(handler: Any) -> None:
    """Have the native side keep the questions of each compilation; nested ones apart."""
    install = handler.install_callbacks

    @functools.wraps(install)
    @contextmanager
    def installed(*args: Any, **kwargs: Any) -> Iterator[None]:
        _C._begin_compile_questions()
        try:
            with install(*args, **kwargs):
                yield
        finally:
            _C._end_compile_questions()

    handler.install_callbacks = installed


def _guard_answers(manager: Any) -> None:
    """Add a guard to each compiled function that has asked."""
    initialise = manager.__init__

    @functools.wraps(initialise)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        questions = _C._compile_questions()
        if questions is not None:
            root = self.guard_manager.root
            root.add_epilogue_lambda_guard(_guard(questions), ["torchft_ext: rank and size"], None)

    manager.__init__ = guarded


def _guard(questions: _C._CompileQuestions) -> Callable[[object], bool]:
    ranks = _ranks() if questions.asked_for_rank() else []
    looked_at = _epochs

    def hold(_locals: object) -> bool:
        nonlocal looked_at
        if not questions.hold():
            return False
        epochs = _epochs
        if looked_at != epochs:
            if any(_differs(group, rank) for group, rank in ranks):
                return False
            looked_at = epochs
        return True

    return hold


def _ranks() -> list[tuple[weakref.ref[dist.ProcessGroup], int]]:
    """Return the groups of this process and its ranks in them.

    For ``dist.get_rank(group)`` torch asks the default group, and its own table for the rest.
    """
    with _aside():
        groups = [g for g in c10d._world.pg_group_ranks if isinstance(g, dist.ProcessGroup)]
        return [(weakref.ref(group), group.rank()) for group in groups]


def _differs(reference: weakref.ref[dist.ProcessGroup], rank: int) -> bool:
    group = reference()
    return group is not None and group.rank() != rank


@contextmanager
def _aside() -> Iterator[None]:
    """What is asked inside is for no compiled function."""
    _C._ask_aside(True)
    try:
        yield
    finally:
        _C._ask_aside(False)


def _leave_out_the_log() -> None:
    """Have torch's log records, which begin with the rank, not count as questions."""
    formatter = _found("torch._logging._internal", "TorchLogsFormatter")
    if formatter is None:
        return
    original = formatter.format

    @functools.wraps(original)
    def format_aside(self: logging.Formatter, record: logging.LogRecord) -> str:
        with _aside():
            return str(original(self, record))

    formatter.format = format_aside
