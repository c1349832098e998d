"""Refuses to load the package beside another torch than the one it was built for."""

from __future__ import annotations

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
