"""Compiled functions that hold the rank or size of an epoch, given up when the next has others.

torch.compile makes constants of ``dist.get_rank()``, ``dist.get_world_size()`` and of the sizes
that functional collectives need, and guards none of them: after configure() with other numbers it
would go on with the old ones. Functions that asked for none are left as they are.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torchft_ext import _C

_CALLBACKS = "torch._dynamo.callback"
_log = logging.getLogger("torchft_ext")
_watching = False


def watch() -> None:
    """Know from here on when a function is being compiled; called when the package is imported.

    torch.compile's own modules take seconds to import, so this waits until somebody else does.
    """
    global _watching
    if _watching:
        return
    _watching = True
    if (module := sys.modules.get(_CALLBACKS)) is not None:
        _mark(module)
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Calls _mark() once the module has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _CALLBACKS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_mark(module: ModuleType) -> None:
            execute(module)
            _mark(module)

        spec.loader.exec_module = execute_and_mark  # type: ignore[method-assign]
        return spec


def _mark(module: ModuleType) -> None:
    """Tell the native side of each compilation; of one without end where torch has changed."""
    _leave_out_the_log()
    handler = getattr(module, "CompilationCallbackHandler", None)
    install = getattr(handler, "install_callbacks", None)
    if install is None:
        _C._compiling(True)
        return

    @functools.wraps(install)
    @contextmanager
    def installed(*args: Any, **kwargs: Any) -> Iterator[None]:
        _C._compiling(True)
        try:
            with install(*args, **kwargs):
                yield
        finally:
            _C._compiling(False)

    handler.install_callbacks = installed  # type: ignore[union-attr]


def _leave_out_the_log() -> None:
    """Have torch's log records, which begin with the rank, not count as questions."""
    formatter = getattr(sys.modules.get("torch._logging._internal"), "TorchLogsFormatter", None)
    if formatter is None:
        return
    original = formatter.format

    @functools.wraps(original)
    def format_aside(self: logging.Formatter, record: logging.LogRecord) -> str:
        _C._asking_aside(True)
        try:
            return str(original(self, record))
        finally:
            _C._asking_aside(False)

    formatter.format = format_aside


def follow_epoch(changed: _C.Backend) -> None:
    """Have compiled functions compiled anew where one may know another rank or size of `changed`.

    All of them: torch has no means to find those concerned.
    """
    if not changed._outdated_when_compiled():
        return
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        _log.info(
            "compiled functions may know an earlier rank or size: all are compiled anew (%d/%d)",
            changed.rank(),
            changed.size(),
        )
        dynamo.reset()
    _C._forget_compiled()
