"""What importing the package does: names in torch.distributed, patches, and the process's end."""

from __future__ import annotations

import atexit
import os
import threading
import time
from datetime import timedelta

import torchft_ext_autoload
from torchft_ext import (
    _C,
    _autograd,
    _children,
    _compiled,
    _ddp,
    _interrupts,
    _metrics_server,
    _torch_patches,
    _torchft,
    _zero,
    errors,
)
from torchft_ext._backends import backends_of

_EXIT_WITHIN = timedelta(seconds=1)
_WAITING = ("ft-guard", "ft-goodbye")  # of torchft_ext.process_group; threads of one call each


def install() -> None:
    """Do it; once. Where TORCHFT_EXT_DISABLE=1 is set, torch keeps its own functions."""
    _C._install_error_factory(errors._from_native)
    atexit.register(at_exit)
    _children.at_their_end(at_exit)
    if os.environ.get("TORCHFT_EXT_DISABLE") != "1":
        _patch_torch()
    torchft_ext_autoload.register()


def _patch_torch() -> None:
    _torch_patches.install(backends_of)
    _torch_patches.around(_torch_patches.futures())
    _torch_patches.around(_ddp.functions())
    _torch_patches.when_imported(_zero.MODULE, lambda: _torch_patches.around(_zero.functions()))
    _torch_patches.when_imported(
        _torchft.MODULE, lambda: _torch_patches.around(_torchft.functions())
    )
    _torch_patches.when_imported(
        _autograd.MODULE, lambda: _torch_patches.around_in_eager(_autograd.methods())
    )
    _torch_patches.when_imported(
        _autograd.FUNCTIONAL,
        lambda: _torch_patches.around(_autograd.functional_collectives()),
    )
    _compiled.watch()


def at_exit() -> None:
    """Say goodbye and end the library's threads; does nothing when called again."""
    _interrupts.release()
    _metrics_server.stop()
    _C._process_exit(_EXIT_WITHIN)
    _await_those_released()


def _await_those_released() -> None:
    """Let threads of Python that waited in the library come back from it.

    One that comes back to an interpreter that ends is ended in the middle of C++, which aborts the
    process.
    """
    limit = time.monotonic() + _EXIT_WITHIN.total_seconds()
    for thread in threading.enumerate():
        if thread.name in _WAITING:
            thread.join(max(limit - time.monotonic(), 0.0))
