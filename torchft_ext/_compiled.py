"""Guards for the numbers of a generation that torch.compile makes constants of.

When torch.compile compiles a function, it asks for ``dist.get_rank()``, ``dist.get_world_size()``
and other numbers that functional collectives need, and guards none of the answers. After
configure() with other numbers the function would continue with the old ones. With these guards it
is compiled again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchft_ext import _C, _torch_patches

_COMPILER = "torch._dynamo.convert_frame"  # imports all that is marked below
_log = logging.getLogger("torchft_ext")
_watching = False
_generations = 0  # that have begun by configure()


def watch() -> None:
    """Guard what is compiled from here on; called when the package is imported."""
    global _watching
    if _watching:
        return
    _watching = True
    _torch_patches.when_imported(_COMPILER, _mark)


def follow_generation() -> None:
    """Have guards look again at ranks in groups that were not asked themselves."""
    global _generations
    _generations += 1


def _mark() -> None:
    if not _torch_patches.around_compilations(_compiling, _guard_answers):
        _log.warning(
            "this torch compiles functions in a way that torchft_ext does not know: they may keep "
            "rank and size of a generation that is over; call torch.compiler.reset() after "
            "configure()"
        )
        return
    _torch_patches.around_log_records(_aside)


@contextmanager
def _compiling() -> Iterator[None]:
    """Have the native side keep the questions of each compilation; nested ones apart."""
    _C._begin_compile_questions()
    try:
        yield
    finally:
        _C._end_compile_questions()


def _guard_answers(guard_manager: Any) -> None:
    """Add a guard to a compiled function that has asked."""
    questions = _C._compile_questions()
    if questions is not None:
        guard_manager.root.add_epilogue_lambda_guard(
            _guard(questions), ["torchft_ext: rank and size"], None
        )


def _guard(questions: _C._CompileQuestions) -> Callable[[object], bool]:
    ranks = _ranks() if questions.asked_for_rank() else []
    looked_at = _generations

    def hold(_locals: object) -> bool:
        nonlocal looked_at
        if not questions.hold():
            return False
        generations = _generations
        if looked_at != generations:
            if any(_differs(group, rank) for group, rank in ranks):
                return False
            looked_at = generations
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
