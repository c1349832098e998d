"""The errors of a failed generation, and what to do about each.

=====================  ======================================================================
class                  what to do
=====================  ======================================================================
PeerLostError          a process died or froze: begin a generation without it
PeerLeftError          a process left in order, before it had done its part: the same
ConnectionLostError    two living processes cannot reach each other: begin a new generation
CommTimeoutError       an operation or configure() ran past its deadline: begin a new generation
CommAbortedError       abort() was called, or a signal came: begin a new generation
StoreLostError         the store cannot be reached: configure() with another one
MismatchError          ranks issued different operations: fix the program
RendezvousError        no generation could be formed (for instance, a rank twice): see the message
=====================  ======================================================================

They are raised by ``wait()``, ``Future.wait()``, ``backward()`` of DDP, functional collectives and
``configure()``; ``Backend.errored()`` returns them. ``except TimeoutError`` catches
CommTimeoutError too. After any of them the generation has failed, but the group can still be used:
call ``configure()`` to begin the next generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistBackendError

from torchft_ext import _events

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
    """The process that caused a failure, as far as it is known.

    Attributes:
        rank: the rank of the process in the failed generation. None if unknown.
        other_rank: for a lost connection, the rank at its other end. Otherwise None.
        host: the name of the process's host. Empty if unknown.
        pid: the process id on that host. None if unknown.
        how: what happened to the process, in one clause, such as "its process ended".
    """

    rank: int | None = None
    other_rank: int | None = None
    host: str = ""
    pid: int | None = None
    how: str = ""


class CommError(DistBackendError):
    """A generation failed, or could not be formed. Base class of all errors of this package.

    Attributes:
        generation: the number of the failed generation. None if no generation had begun.
        rank: the rank of this process in it. None if no generation had begun.
        size: its world size.
        cause: the process that caused the failure.
        op: the operation that noticed the failure, such as "allreduce". Empty between operations.
        seq: the number of that operation in its generation. None between operations.
        elapsed: the time from the issue of the operation to the failure.
        limit: the limit that the operation had. None if it had none.
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
    """A process of the generation left in order, before it had done its part of an operation."""


class ConnectionLostError(CommError):
    """Two living processes of the generation cannot reach each other."""


class CommTimeoutError(CommError, TimeoutError):
    """An operation or configure() ran past its deadline."""


class CommAbortedError(CommError):
    """abort() was called on some rank, or a signal interrupted a wait."""


class StoreLostError(CommError):
    """The store in which the members were to meet cannot be reached."""


class MismatchError(CommError):
    """Ranks issued different operations; by configure(): they have other tables of plans."""


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
    group: str,
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
    _events.failure(kind, message, group, generation, rank)
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
