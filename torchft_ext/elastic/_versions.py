"""Which member's state the others take."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from torchft_ext.elastic._errors import ElasticError, StateLostError
from torchft_ext.elastic._state import NO_LINEAGE

__all__ = ["WHOLE", "Header", "check_names", "choose_shard_sources", "choose_source"]

_LAYOUT = struct.Struct("<??q16s16sq?")
WHOLE = -1  # in the place of a shard's number: the state is not sharded


@dataclass(frozen=True)
class Header:
    """What each member tells the others first; equally long from all.

    Attributes:
        continuing: it has held the job's state since the last view.
        dirty: it must not be the source.
        step: how many steps are committed in its state.
        lineage: 16 bytes; of the job in which they were.
        names: 16 bytes that depend on the names of its objects.
        shard: the number of the shard that it holds or is to take; WHOLE: there are no shards.
        over: it knows that the run is over.
    """

    continuing: bool
    dirty: bool
    step: int
    lineage: bytes
    names: bytes
    shard: int = WHOLE
    over: bool = False

    def pack(self) -> bytes:
        """Return the header in bytes."""
        return _LAYOUT.pack(*astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Return the header that these bytes hold."""
        return cls(*_LAYOUT.unpack(data))

    @property
    def version(self) -> tuple[bytes, int]:
        """Members of one version should have one state."""
        return self.lineage, self.step

    @property
    def holds_state(self) -> bool:
        """It has the job's state, whole."""
        return self.continuing and not self.dirty

    @property
    def is_cold(self) -> bool:
        """It is a newcomer with nothing that could be spared: all of its state is replaced."""
        return self.dirty and not self.continuing and self.lineage == NO_LINEAGE


def choose_source(headers: Sequence[Header]) -> int:
    """Return the rank whose state all take.

    Among the clean members that continue, one of the highest step, the lowest rank of these; where
    nobody continues, the same among all that are clean.

    Raises:
        StateLostError: there is none.
    """
    goes_on = any(header.continuing for header in headers)
    able = [
        rank
        for rank, header in enumerate(headers)
        if not header.dirty and (header.continuing or not goes_on)
    ]
    if not able:
        why = (
            "an update of every one that goes on, or a transfer to it, did not end"
            if goes_on
            else "those that had it are gone, and the rest are newcomers"
        )
        raise StateLostError(
            f"sync: none of {len(headers)} members has a whole copy of the state: {why}; found a "
            "new job from a checkpoint"
        )
    return max(able, key=lambda rank: (headers[rank].step, -rank))


def choose_shard_sources(headers: Sequence[Header], source: int) -> dict[int, int]:
    """Return for the number of each shard the rank from which members of that shard take it.

    The lowest rank of those that hold the shard in the source's version, the source itself first.

    Raises:
        StateLostError: no living member holds one of them, on all members.
    """
    version, goes_on = headers[source].version, headers[source].continuing
    holders = [
        rank
        for rank, header in enumerate(headers)
        if not header.dirty and header.version == version and header.continuing == goes_on
    ]
    found: dict[int, int] = {}
    for rank in sorted(holders, key=lambda rank: (rank != source, rank)):
        found.setdefault(headers[rank].shard, rank)
    lost = sorted({header.shard for header in headers} - found.keys())
    if lost:
        raise StateLostError(
            f"sync: no living member holds shard {lost[0]} of step {version[1]}: all replicas of "
            "it are gone; found a new job from a checkpoint"
        )
    return found


def check_names(headers: Sequence[Header], rank: int, names: Sequence[str]) -> None:
    """Refuse states of other objects.

    Args:
        headers: of all members, by rank.
        rank: this member's.
        names: of its objects.

    Raises:
        ElasticError: there are some, on all members.
    """
    others = [at for at, header in enumerate(headers) if header.names != headers[rank].names]
    if others:
        raise ElasticError(
            f"sync: the state of ranks {others} has other objects than {list(names)} of rank "
            f"{rank}: make State() of the same objects, in one order, on all members"
        )
