"""Backends that stand in gloo's place say their own name while torch asks for gloo's own class."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torchft_ext import _C


@contextlib.contextmanager
def own_names(backends: Iterable[_C.Backend]) -> Iterator[None]:
    """Let these backends call themselves "ft" within the block.

    For code of torch that takes every backend of the name "gloo" for its own ProcessGroupGloo.
    """
    ours = tuple(backends)
    for backend in ours:
        backend._say_own_name(True)
    try:
        yield
    finally:
        for backend in ours:
            backend._say_own_name(False)
