"""What the members decided: who takes part, and whether a step counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

__all__ = ["Answer", "Digest", "View"]


@dataclass(frozen=True)
class Digest:
    """What a member has computed, in hashes that members compare as they agree.

    Attributes:
        common: 1 to 16 bytes, of what all members have to hold alike; empty: it says nothing.
        of_shard: the same of what the members that hold one shard have to hold alike.
        shard: the number of that shard, from 0 on.
    """

    common: bytes = b""
    of_shard: bytes = b""
    shard: int = 0


@dataclass(frozen=True)
class View:
    """The decided members of one generation.

    Attributes:
        number: of the generation. Views of one lineage have different numbers that grow.
        lineage: 16 bytes; the job's, until an operator goes on without a quorum.
        rank: this member's, 0 to `size` - 1.
        size: how many members; the world size.
        old_size: the size of the view before it; 0 in the first one.
        members: their ids in hex, by rank. A process that joins again has another id.
        continuing: this member was in the last view that was formed.
        members_continuing: the same of every member, by rank.
        founder: this member is one since the job's founding.
        phases: how long each part of the change took. After a failure: "detect" (how long the lost
            process had been silent, where this one found it out) and "release" (from there until
            the call of recover()). Then "agree" (on the members), "connect" (all groups), "tables"
            (torch's), and after steps() has synced, "sync".
    """

    number: int
    lineage: bytes
    rank: int
    size: int
    old_size: int
    members: tuple[str, ...]
    continuing: bool
    members_continuing: tuple[bool, ...]
    founder: bool = False
    phases: dict[str, timedelta] = field(default_factory=dict, compare=False)

    @property
    def source(self) -> int:
        """The lowest rank that was in the view before: it has the state. 0 in the first view."""
        went_on = (rank for rank, was in enumerate(self.members_continuing) if was)
        return next(went_on, 0)

    @property
    def member(self) -> str:
        """This member's id."""
        return self.members[self.rank]


@dataclass(frozen=True)
class Answer:
    """What the members of a view agreed on; the same on all of them.

    Attributes:
        ok: every member voted yes.
        lost: ids of members, in hex, whose votes are missing.
        notes: what each member added to its vote, by rank of the view; empty where it is missing.
        waiting: ids of processes that wait to be taken in.
        leaving: ids of members that want to leave.
        new_witness: the job's store is another one than the witness of the view, or restarted
            empty: the next view appoints it, so recover() is due.
        diverged: the digests of members differ that have to be equal; `ok` is False then.
        last: a member said that the run is over after this, if the answer is ok.
    """

    ok: bool
    lost: tuple[str, ...] = ()
    notes: tuple[bytes, ...] = ()
    waiting: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    new_witness: bool = False
    diverged: bool = False
    last: bool = False

    @property
    def changes_view(self) -> bool:
        """Whether all members have to recover() now, at one boundary."""
        return bool(self.waiting or self.leaving or self.new_witness)
