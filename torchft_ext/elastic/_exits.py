"""The exit codes of a worker of an elastic job: what a launcher is to make of its end."""

from __future__ import annotations

from enum import IntEnum

from torchft_ext.elastic._errors import (
    DivergenceError,
    ElasticError,
    JobOverError,
    NoProgressError,
    NoQuorumError,
    RepeatedError,
    StateLostError,
)

__all__ = ["Exit", "exit_code_of"]


class Exit(IntEnum):
    """How a worker's part in a job ended. 80 to 89: starting the worker again does not help.

    Attributes:
        OVER: the job is known to be over: this process has seen its end, came after it, or was a
            spare that was not needed.
        FAILED: an exception of the program.
        UNAVAILABLE: the store does not answer, or other members did not come in time.
        HUNG: its program did not come back after the others had gone on without it; the parent of
            run(supervise=True) starts it again.
        LEFT: it was told to leave (SIGTERM) before the job was over. sysexits' "try again".
        NO_QUORUM: too many members were lost at once.
        STATE_LOST: no member has a whole copy of the state.
        DIVERGED: members hold different state or gradients.
        NO_PROGRESS: views came to nothing, for a cause that does not pass.
        REPEATED: an exception ended members one after the other in the same step.
    """

    OVER = 0
    FAILED = 1
    UNAVAILABLE = 69
    HUNG = 70
    LEFT = 75
    NO_QUORUM = 80
    STATE_LOST = 81
    DIVERGED = 82
    NO_PROGRESS = 83
    REPEATED = 84


_CODES: tuple[tuple[type[ElasticError], Exit], ...] = (
    (JobOverError, Exit.OVER),
    (NoQuorumError, Exit.NO_QUORUM),
    (StateLostError, Exit.STATE_LOST),
    (DivergenceError, Exit.DIVERGED),
    (NoProgressError, Exit.NO_PROGRESS),
    (RepeatedError, Exit.REPEATED),
    (ElasticError, Exit.UNAVAILABLE),
)


def exit_code_of(error: BaseException) -> Exit:
    """Return the code of a worker that ends by this error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), Exit.FAILED)
