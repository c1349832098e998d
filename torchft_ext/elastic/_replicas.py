"""Members of a view as replicas of a fixed number of shards, for hybrid sharding (HSDP)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from torchft_ext.elastic._errors import StateLostError
from torchft_ext.elastic._view import View
from torchft_ext.elastic._wire import Wire

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Held", "Place", "Replicas", "arrange"]

_LAYOUT = struct.Struct("<qq?q??")


@dataclass(frozen=True)
class Place:
    """Where a member trains.

    Attributes:
        replica: the number of its replica, from 0 on.
        shard: the number of the shard that it holds, from 0 on.
        rank: among all that train, 0 to `size` - 1, replica by replica.
        size: how many train: replicas times shards.
    """

    replica: int
    shard: int
    rank: int
    size: int


@dataclass(frozen=True)
class Held:
    """What a member brings into a view; equally long in bytes from all.

    Attributes:
        replica: in which it was last; -1: in none yet.
        shard: whose parts it has; -1: it has none.
        clean: these are the parts of one step.
        step: how many steps are committed in them.
        continuing: it has held the job's state since the last view.
        over: it knows that the run is over.
    """

    replica: int = -1
    shard: int = -1
    clean: bool = False
    step: int = 0
    continuing: bool = False
    over: bool = False

    def pack(self) -> bytes:
        """Return it in bytes."""
        return _LAYOUT.pack(*astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Held:
        """Return what these bytes hold."""
        return cls(*_LAYOUT.unpack(data))


def arrange(shards: int, held: Sequence[Held]) -> list[Place | None]:
    """Say where each member trains; the same on all, for the same arguments.

    Replicas that are whole stay whole. Of the other members further replicas are made: shards go to
    those who hold them, then to any. Who is left over, fewer than a replica, is parked.

    Args:
        shards: how many one replica has.
        held: what each member of the view brings, by rank.

    Returns:
        By rank; None: parked.

    Raises:
        StateLostError: the job has a state, and no member holds one of its shards.
    """
    newest = newest_step(held)
    holds = [
        one.shard if one.continuing and one.clean and one.step == newest else -1 for one in held
    ]
    _check_kept(shards, held, holds)
    rows = _whole_replicas(shards, held, holds)
    free = [rank for rank in range(len(held)) if not any(rank in row for row in rows)]
    while len(free) >= shards:
        row = _one_replica(shards, free, held, holds)
        rows.append(row)
        free = [rank for rank in free if rank not in row]
    size = len(rows) * shards
    places: list[Place | None] = [None] * len(held)
    for replica, row in enumerate(rows):
        for shard, rank in enumerate(row):
            places[rank] = Place(replica, shard, replica * shards + shard, size)
    return places


def newest_step(held: Sequence[Held]) -> int:
    """Return how many steps are committed in the newest parts that somebody has."""
    return max((one.step for one in held if one.continuing and one.clean), default=0)


def _check_kept(shards: int, held: Sequence[Held], holds: Sequence[int]) -> None:
    if not any(one.continuing for one in held):
        return  # the job begins
    lost = sorted(set(range(shards)) - set(holds))
    if lost:
        raise StateLostError(
            f"none of {len(held)} members holds shard {lost[0]} of {shards}: all replicas of it "
            "are gone, or an update of it did not end; found a new job from a checkpoint"
        )


def _whole_replicas(shards: int, held: Sequence[Held], holds: Sequence[int]) -> list[list[int]]:
    """Ranks by shard, of each replica that has lost nobody."""
    rows = []
    for replica in sorted({one.replica for one in held if one.replica >= 0}):
        row = {holds[r]: r for r, one in enumerate(held) if one.replica == replica}
        row.pop(-1, None)
        if len(row) == shards:
            rows.append([row[shard] for shard in range(shards)])
    return rows


def _one_replica(
    shards: int, free: Sequence[int], held: Sequence[Held], holds: Sequence[int]
) -> list[int]:
    """Ranks by shard: of each shard its first holder, else who had it, else who comes next."""
    row = [_first(rank for rank in free if holds[rank] == shard) for shard in range(shards)]
    for wanted in (True, False):  # first who may have some of it, then any
        for shard in range(shards):
            if row[shard] < 0:
                row[shard] = _first(
                    rank
                    for rank in free
                    if rank not in row and (held[rank].shard == shard or not wanted)
                )
    return row


def _first(ranks: Iterable[int]) -> int:
    return next(iter(ranks), -1)


class GroupMaker(Protocol):
    """What Replicas asks of a job; Job is one."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The managed default group."""

    def make_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Make a group of these ranks of the view, for as long as the view lasts."""


class Replicas:
    """Replicas of a model that is cut into a fixed number of shards, as the members come and go.

    Give it to steps(), with a `build` that wraps the model anew on `mesh` for each view. As many
    replicas train as there are members for. Others are *parked*: steps() yields them no steps; they
    vote in all agreements, and train on once members for another replica are there. With one
    replica (FSDP without hybrid sharding) nobody has a second copy: a death loses the state.

    The user makes and owns it, one for each job. Threads: one at a time.

    Attributes:
        shards: how many members one replica has.
        place: where this member trains; None: nowhere, it is parked.
        mesh: of the view, `[replicas, shards]`, of global ranks; None: parked. Its groups end with
            the view, and are aborted when it is over.
        group: of all that train; None: parked.
        alone: ranks of the view that hold the only copy of their shard once all that train have
            the state: those of a single replica.
    """

    def __init__(
        self,
        shards: int,
        *,
        device_type: str = "cpu",
        names: tuple[str, str] = ("replica", "shard"),
    ) -> None:
        """Say what a replica is; the same on all members.

        Args:
            shards: how many members one replica has.
            device_type: of the mesh.
            names: of the mesh's dimensions.

        Raises:
            ValueError: `shards` is below 1.
        """
        if shards < 1:
            raise ValueError(f"Replicas: shards: expected at least 1, found {shards}")
        self.shards = shards
        self.place: Place | None = None
        self.mesh: DeviceMesh | None = None
        self.group: dist.ProcessGroup | None = None
        self.alone: tuple[int, ...] = ()
        self._device_type = device_type
        self._names = names

    def follow(self, job: GroupMaker, view: View, held: Held) -> tuple[int, bool]:
        """Take a place in a view; steps() calls it. Blocks, in collectives of all members.

        Returns:
            How many steps the job has committed, and whether the run is over: a newcomer that is
            parked learns it here.

        Raises:
            StateLostError: no member holds one of the shards. On all members.
            CommError: the view is over.
        """
        self.place = self.mesh = self.group = None
        self.alone = ()
        packed = Wire(job.group).all_gather_bytes(held.pack())
        brought = [Held.unpack(data) for data in packed]
        places = arrange(self.shards, brought)
        self.place = places[view.rank]
        training = [rank for rank, place in enumerate(places) if place is not None]
        self.alone = tuple(training) if len(training) == self.shards else ()
        if self.place is not None:
            self._make_groups(job, places, self.place)
        return newest_step(brought), any(one.over for one in brought)

    def _make_groups(self, job: GroupMaker, places: Sequence[Place | None], mine: Place) -> None:
        ranks = {place.rank: rank for rank, place in enumerate(places) if place is not None}
        grid = torch.tensor([ranks[at] for at in range(mine.size)]).view(-1, self.shards)
        names = (f"{self._names[0]}/{mine.shard}", f"{self._names[1]}/{mine.replica}")
        lines = (grid[:, mine.shard], grid[mine.replica])
        made = [
            job.make_group(name, line.tolist()) for name, line in zip(names, lines, strict=True)
        ]
        self.mesh = _mesh_of(made, self._device_type, grid, self._names)
        whole = mine.size == len(places)
        self.group = job.group if whole else job.make_group("training", grid.flatten().tolist())


def _mesh_of(
    groups: list[dist.ProcessGroup], device_type: str, grid: torch.Tensor, names: tuple[str, str]
) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=names)
