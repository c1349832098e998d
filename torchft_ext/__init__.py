"""Process groups that can be aborted at any moment and formed anew.

    import torch.distributed as dist
    import torchft_ext

    dist.init_process_group("ft")
    ...
    try:
        dist.all_reduce(tensor)
    except torchft_ext.CommError:
        torchft_ext.backend().configure("10.0.0.1:29500/generation2", rank=new_rank,
        world_size=new_size)

The group object that DDP or other code holds stays the same. ``init_process_group("ft")`` needs no
import of this package.
"""
# ruff: noqa: E402 (the native module must not be loaded before torch's version has been checked)

from __future__ import annotations

import atexit
import threading
import time
from datetime import timedelta

import torch

from torchft_ext import _build_info


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


if _minor(torch.__version__) != _minor(_build_info.TORCH_VERSION):
    # Not left to the loader: such a build loads, and then calls the wrong virtual functions.
    raise ImportError(
        f"this torchft_ext was built for torch {'.'.join(_minor(_build_info.TORCH_VERSION))}, "
        f"found torch {torch.__version__}: install it again with this torch present "
        "(pip install --force-reinstall --no-deps --no-build-isolation .)"
    )

import torch.distributed

import torchft_ext_autoload
from torchft_ext import (
    _C,
    _children,
    _compiled,
    _ddp,
    _interrupts,
    _torch_patches,
    _torchft,
    _zero,
    errors,
)
from torchft_ext._C import Backend, Options, Work
from torchft_ext._groups import adopt, backend, backends_of
from torchft_ext._make_group import make_group
from torchft_ext._stats import Stats
from torchft_ext.errors import (
    Cause,
    CommAbortedError,
    CommError,
    CommTimeoutError,
    ConnectionLostError,
    MismatchError,
    PeerLeftError,
    PeerLostError,
    RendezvousError,
    StoreLostError,
)

__all__ = [
    "Backend",
    "Cause",
    "CommAbortedError",
    "CommError",
    "CommTimeoutError",
    "ConnectionLostError",
    "MismatchError",
    "Options",
    "PeerLeftError",
    "PeerLostError",
    "RendezvousError",
    "Stats",
    "StoreLostError",
    "Work",
    "adopt",
    "backend",
    "make_group",
]
__version__ = _build_info.VERSION

_EXIT_WITHIN = timedelta(seconds=1)
_WAITING = ("ft-guard", "ft-goodbye")  # of torchft_ext.process_group; threads of one call each


def _at_exit() -> None:
    """Say goodbye and end the library's threads; does nothing when called again."""
    _interrupts.release()
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


_C._install_error_factory(errors._from_native)
atexit.register(_at_exit)
_children.at_their_end(_at_exit)
_torch_patches.install(backends_of)
_torch_patches.around(_torch_patches.futures())
_torch_patches.around(_ddp.functions())
_torch_patches.when_imported(_zero.MODULE, lambda: _torch_patches.around(_zero.functions()))
_torch_patches.when_imported(_torchft.MODULE, lambda: _torch_patches.around(_torchft.functions()))
_compiled.watch()
torchft_ext_autoload.register()
