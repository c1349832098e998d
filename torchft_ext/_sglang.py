"""SGLang's plugin "torchft_ext": its steps and its errors over groups of this package.

SGLang calls register() in each of its processes. Where "gloo" is not replaced it does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import torchft_ext_names
from torchft_ext import _torch_patches
from torchft_ext._backends import backends_of
from torchft_ext.errors import CommError

_STEP = "sglang.srt.managers.scheduler_components.dp_attn"
_LOADING = "sglang.srt.model_executor.model_runner_components.load_model_utils"

_Around = list[tuple[Any, str, Callable[..., Any]]]


def register() -> None:
    """Stand around functions of SGLang, now or when they are imported. Idempotent.

    Versions: SGLang 0.5.23. Reason: it works around the time of gloo's all_gather, and leaves out
    what an error came from. End: with hooks of SGLang's own for both.
    """
    if not torchft_ext_names.replaces_gloo(c10d):
        return
    _torch_patches.when_imported(_STEP, lambda: _torch_patches.around(_of_step()))
    _torch_patches.when_imported(_LOADING, lambda: _torch_patches.around(_of_loading()))


def _of_step() -> _Around:
    return _known(sys.modules[_STEP], "exchange_sync_rows", _exchange_sync_rows)


def _of_loading() -> _Around:
    return _known(sys.modules[_LOADING], "dist_barrier_after_load", _dist_barrier_after_load)


def _known(module: Any, name: str, ours: Callable[..., Any]) -> _Around:
    """Return none where it is not there: another version's."""
    return [(module, name, ours)] if callable(getattr(module, name, None)) else []


def _exchange_sync_rows(
    theirs: Callable[..., None],
    global_flat: torch.Tensor,
    local_row: torch.Tensor,
    group: dist.ProcessGroup,
) -> None:
    """Gather all rows in one operation; SGLang gathers to one rank and broadcasts, for gloo."""
    if local_row.device.type != "cpu" or not any(backends_of(group)):
        return theirs(global_flat, local_row, group)
    of_sglang: Any = sys.modules[_STEP]
    of_sglang.all_gather_single(global_flat, local_row, group=group)
    return None


def _dist_barrier_after_load(theirs: Callable[..., None], **options: Any) -> None:
    """Say what became of the rank that did not come.

    Raises:
        ValueError: as SGLang's, with the failure's text and the failure as its cause.
    """
    try:
        theirs(**options)
    except ValueError as error:
        failure = _failure_behind(error)
        if failure is None:
            raise
        raise ValueError(f"{error} {failure}") from failure


def _failure_behind(error: BaseException) -> CommError | None:
    """Return the failure that was being handled when the error was raised; None: another's."""
    behind = error.__context__
    return behind if isinstance(behind, CommError) else None
