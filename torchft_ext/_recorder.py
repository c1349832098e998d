"""The record of the last operations of each group, as a file."""

from __future__ import annotations

import os

from torchft_ext import _C


def dump(path: str | os.PathLike[str]) -> None:
    """Write the last operations of all groups of this process to a file.

    The record is always on: names, sizes, times and states of the last 2,000 operations of each
    group (``TORCH_FR_BUFFER_SIZE``), of its last 8 generations at most. Blocks for the disk alone.
    Threads: any. An earlier file of that name is replaced at once.

    Args:
        path: of the file. A name that ends in ``.json`` gets JSON, for ``torchft_ext.analyze``;
            any other a pickle of the collectives, for torch's analyser, which takes the digits at
            the end of the name for the rank.

    Raises:
        OSError: the file cannot be written; an earlier one is left as it was.
    """
    name = os.fspath(path)
    error = _C._dump(name)
    if error:
        raise OSError(error, os.strerror(error), name)
