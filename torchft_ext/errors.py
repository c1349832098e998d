"""What a failed generation raises, and what the caller does about it.

=====================  ======================================================================
class                  what to do
=====================  ======================================================================
PeerLostError          a process died or froze: begin a generation without it
PeerLeftError          a process left cleanly before doing its part: begin a generation without it
ConnectionLostError    two living processes cannot reach each other: begin a new generation
CommTimeoutError       an operation or configure() ran past its deadline: begin a new generation
CommAbortedError       somebody called abort(), or a signal came: begin a new generation
StoreLostError         the store cannot be reached: configure() with another one
MismatchError          ranks issued different operations: fix the program
RendezvousError        the generation could not be formed (a duplicate rank, say): see the message
=====================  ======================================================================

``wait()``, ``Future.wait()``, ``backward()`` of DDP, functional collectives and ``configure()``
raise them; ``Backend.errored()`` returns them. ``except TimeoutError`` takes CommTimeoutError too.
After any of them the group is failed and whole: the next ``configure()`` starts clean.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistBackendError

__all__ = [
    "Cause",
    "CommAbortedError",
    "CommError",
    "CommTimeoutError",
    "ConnectionLostError",
    "MismatchError",
    "PeerLeftError",
    "PeerLostError",
    "RendezvousError",
    "StoreLostError",
]


def __dir__() -> list[str]:
    """Show completion the names of this module, without what it imports."""
    return [*__all__, *(name for name in globals() if name.startswith("_"))]


@dataclass(frozen=True)
class Cause:
    """Who caused a failure, as far as is known.

    Attributes:
        rank: its rank in the failed generation; None where it is not known.
        other_rank: of a lost connection, the rank at its other end; else None.
        host: its host's name; empty where it is not known.
        pid: its process id on that host; None where it is not known.
        how: one clause that says what happened.
    """

    rank: int | None = None
    other_rank: int | None = None
    host: str = ""
    pid: int | None = None
    how: str = ""


class CommError(DistBackendError):
    """The communication of a generation failed. Base of all errors of this package.

    Attributes:
        generation: number of the failed generation; None where none had begun.
        rank: this process's rank in it; None where none had begun.
        size: its world size.
        cause: who caused it.
        op: the operation that noticed, such as "allreduce"; empty between operations.
        seq: that operation's number in its generation; None between operations.
        elapsed: from the issue of the operation to the failure.
        limit: the limit it had; None where it had none.
    """

    def __init__(
        self,
        message: str | CommError = "",
        *,
        generation: int | None = None,
        rank: int | None = None,
        size: int = 0,
        cause: Cause | None = None,
        op: str = "",
        seq: int | None = None,
        elapsed: timedelta = timedelta(0),
        limit: timedelta | None = None,
    ) -> None:
        if isinstance(message, CommError):  # another raise of the same failure
            super().__init__(*message.args)
            self.__dict__.update(message.__dict__)
            return
        super().__init__(message)
        self.generation = generation
        self.rank = rank
        self.size = size
        self.cause = cause if cause is not None else Cause()
        self.op = op
        self.seq = seq
        self.elapsed = elapsed
        self.limit = limit

    def __reduce__(self) -> tuple[type[CommError], tuple[Any, ...], dict[str, Any]]:
        """Pickle with all fields, so that the error survives the way out of a worker process."""
        return type(self), self.args, self.__dict__


class PeerLostError(CommError):
    """A process of the generation died or froze."""


class PeerLeftError(CommError):
    """A process of the generation left cleanly before doing its part of an operation."""


class ConnectionLostError(CommError):
    """Two living processes of the generation cannot reach each other."""


class CommTimeoutError(CommError, TimeoutError):
    """An operation or configure() ran past its deadline."""


class CommAbortedError(CommError):
    """abort() was called on some rank, or a signal interrupted a wait."""


class StoreLostError(CommError):
    """The store that the generation was to be formed over cannot be reached."""


class MismatchError(CommError):
    """Ranks issued different operations."""


class RendezvousError(CommError):
    """The generation could not be formed: a duplicate rank, a refused peer, a malformed record."""


_CLASSES: dict[str, type[CommError]] = {
    "peer_lost": PeerLostError,
    "peer_left": PeerLeftError,
    "connection_lost": ConnectionLostError,
    "timeout": CommTimeoutError,
    "aborted": CommAbortedError,
    "store_lost": StoreLostError,
    "mismatch": MismatchError,
    "rendezvous": RendezvousError,
}


def _kind_of(error: CommError) -> str:
    """Return the name of a failure's kind."""
    return next((kind for kind, one in _CLASSES.items() if isinstance(error, one)), "internal")


def _known(number: int) -> int | None:
    return number if number >= 0 else None


def _from_native(
    kind: str,
    message: str,
    *,
    generation: int,
    rank: int,
    size: int,
    op: str,
    seq: int,
    elapsed: float,
    limit: float,
    cause_rank: int,
    other_rank: int,
    host: str,
    pid: int,
    how: str,
) -> CommError:
    """Make the error of a native failure; times are in seconds, -1 means not known."""
    return _CLASSES.get(kind, CommError)(
        message,
        generation=_known(generation),
        rank=_known(rank),
        size=size,
        cause=Cause(_known(cause_rank), _known(other_rank), host, _known(pid), how),
        op=op,
        seq=_known(seq),
        elapsed=timedelta(seconds=elapsed),
        limit=timedelta(seconds=limit) if limit > 0 else None,
    )
