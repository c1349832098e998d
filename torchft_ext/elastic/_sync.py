"""Gives the members of a view one state: who has it sends, who lacks something takes it."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b

import torch
import torch.distributed as dist

from torchft_ext.elastic._codec import Encoded, TensorMeta
from torchft_ext.elastic._description import Description, ShardList
from torchft_ext.elastic._drift import distances
from torchft_ext.elastic._errors import DivergenceError
from torchft_ext.elastic._loading import Leaves, load, tensor_paths
from torchft_ext.elastic._shards import local_of
from torchft_ext.elastic._state import State, memory_of
from torchft_ext.elastic._transfer import Transfer
from torchft_ext.elastic._versions import (
    WHOLE,
    Header,
    check_names,
    choose_shard_sources,
    choose_source,
)
from torchft_ext.elastic._wire import Wire

__all__ = ["SyncReport", "sync"]

_SUMMARY = struct.Struct("<16sq16sq")


@dataclass(frozen=True)
class SyncReport:
    """What a sync did; the same on all members but for `elapsed`, and on those of other shards.

    Attributes:
        source: rank of the member whose state it is now.
        step: how many steps are committed in it.
        took: ranks that took something.
        tensors: how many were sent; of sharded ones, of this member's shard.
        nbytes: their size; to each member that takes, once.
        elapsed: on this member.
        drift: the largest distance, relative to the norm of the source's, of a tensor in which
            members of the source's version had drifted.
        drifted: which one that is; empty: none.
        over: a member knows that the run is over.
    """

    source: int
    step: int
    took: tuple[int, ...]
    tensors: int
    nbytes: int
    elapsed: timedelta
    drift: float = 0.0
    drifted: str = ""
    over: bool = False


def sync(
    state: State,
    group: dist.ProcessGroup,
    *,
    continuing: bool,
    lineage: bytes,
    step: int,
    dirty: bool,
    allow_pickle: bool = False,
    shard: int = WHOLE,
    drift: float = 0.0,
    over: bool = False,
) -> SyncReport:
    """Make the state of all members of a view bit-identical.

    Blocks, in collectives; all members call it. The source is, among the clean members that
    continue, one of the highest step, the lowest rank of these; where nobody continues, the same
    among all that are clean. Members compare versions and hashes; a tensor travels only where some
    member differs from the source in it. A dirty newcomer without a lineage takes everything, and
    hashes nothing; nor does the source where there are only such. While something of the state is
    overwritten the state is dirty, and stays so when that fails. Tensors go along a pipeline, from
    the source through all that lack something. After a failure another source goes on in the next
    view: tensors that had arrived are not sent again.

    Of sharded tensors (DTensor) members of one shard take their parts from one of them that holds
    it in the source's version.

    Args:
        state: its objects have the same names and order on all members.
        group: of the view, formed.
        continuing: this member has held the job's state since the last view.
        lineage: 16 bytes; with `step` the version of this member's state.
        step: how many steps are committed in it.
        dirty: this member must not be the source.
        allow_pickle: leaves of other types travel by pickle.
        shard: the number of the shard whose parts this member holds, or is to take where it is
            dirty.
        drift: of clean members that continue and have one version: how far tensors of floats may be
            from the source's, relative to their norm; they take the source's then. For members
            whose processors round differently.
        over: this member knows that the run is over; all learn that one does.

    Returns:
        What was done. The state's step is that of the source, and it is clean.

    Raises:
        StateLostError: no member is clean, or none of those that continue, or none of those that
            hold one of the shards. On all members.
        DivergenceError: clean members that continue have one version and unequal state. On all.
        ElasticError: the objects have other names or another order on some member (on all), or
            one did not take the state.
        TypeError: a leaf cannot be sent.
        CommError: the group failed: sync again in the next view.

    Threads: the caller's only. Source: broadcasting a state_dict, as newcomers do it by hand.
    """
    began = time.monotonic()
    wire = Wire(group)
    state.allow_pickle = state.allow_pickle or allow_pickle
    encoded = state.encode()  # refuses what cannot be sent before others wait for it
    header = Header(continuing, dirty, step, lineage, _digest_of_names(state), shard, over)
    plan = _Plan.of([Header.unpack(data) for data in wire.all_gather_bytes(header.pack())])
    check_names(plan.headers, wire.rank, state.names)
    done = _Exchange(state, wire, plan, encoded, drift).run()
    state.step = plan.headers[plan.source].step
    state.dirty = False
    elapsed = timedelta(seconds=time.monotonic() - began)
    report = (plan.source, state.step, done.took, done.tensors, done.nbytes, elapsed)
    is_over = any(header.over for header in plan.headers)
    return SyncReport(*report, done.drift, done.drifted, is_over)


def _digest_of_names(state: State) -> bytes:
    return blake2b(repr(state.names).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class _Plan:
    """Who takes what from whom; the same on all members.

    Attributes:
        headers: of all members, by rank.
        source: the rank from which what is not sharded is taken.
        shard_sources: ranks from which the parts are taken, by the number of the shard.
    """

    headers: Sequence[Header]
    source: int
    shard_sources: Mapping[int, int]

    @classmethod
    def of(cls, headers: Sequence[Header]) -> _Plan:
        source = choose_source(headers)
        return cls(headers, source, choose_shard_sources(headers, source))

    def shard_source(self, rank: int) -> int:
        """From whom this rank takes its parts."""
        return self.shard_sources[self.headers[rank].shard]

    def shares_shard(self, rank: int) -> list[int]:
        """The members of this rank's shard, the source first."""
        first, shard = self.shard_source(rank), self.headers[rank].shard
        others = [at for at, header in enumerate(self.headers) if header.shard == shard]
        return [first, *(at for at in others if at != first)]

    def hashes(self, rank: int) -> bool:
        """Whether this rank's values are compared with anybody's."""
        warm = sum(not header.is_cold for header in self.headers)
        return warm > 1 and not self.headers[rank].is_cold

    def peers(self) -> list[int]:
        """Who should hold the source's state already."""
        version = self.headers[self.source].version
        return [
            rank
            for rank, header in enumerate(self.headers)
            if header.holds_state and header.version == version
        ]


@dataclass(frozen=True)
class _Done:
    """What an exchange sent, and to whom."""

    took: tuple[int, ...] = ()
    tensors: int = 0
    nbytes: int = 0
    drift: float = 0.0
    drifted: str = ""


@dataclass(frozen=True)
class _Summary:
    """Digests and sizes of one member's descriptions."""

    whole: bytes
    whole_size: int
    shards: bytes
    shards_size: int


@dataclass(frozen=True)
class _Lacks:
    """What members lack of the sources' states.

    Attributes:
        places: what they may lack, of what is not sharded.
        shards: paths of sharded tensors.
        flags: of each rank, for places, then for shards.
    """

    places: list[str]
    shards: list[str]
    flags: Sequence[bytes]

    def by(self, rank: int) -> tuple[set[str], set[str]]:
        """What this rank lacks: places, and paths of parts."""
        names = [*self.places, *self.shards]
        chosen = [index for index, flag in enumerate(self.flags[rank]) if flag]
        whole = {names[index] for index in chosen if index < len(self.places)}
        return whole, {names[index] for index in chosen if index >= len(self.places)}


class _Exchange:
    """The part of a sync in which members differ: find out where, send that, load it."""

    def __init__(
        self,
        state: State,
        wire: Wire,
        plan: _Plan,
        encoded: Mapping[str, Encoded],
        drift: float,
    ) -> None:
        self._state = state
        self._wire = wire
        self._plan = plan
        self._drift = drift
        hashed = plan.hashes(wire.rank)
        self._mine = Description.of(encoded, hashed=hashed)
        self._parts = ShardList.of(encoded, hashed=hashed)
        self._leaves = Leaves.among(encoded)

    def run(self) -> _Done:
        summaries = self._summaries()
        if self._are_alike(summaries):
            return _Done()
        plan, rank = self._plan, self._wire.rank
        size = summaries[plan.source].whole_size
        payload = self._wire.broadcast_bytes(self._mine.payload, size, plan.source)
        theirs = Description.unpack(payload, allow_pickle=self._state.allow_pickle)
        parts = self._parts
        if theirs.wholes:
            size = summaries[plan.shard_source(rank)].shards_size
            data = self._wire.share_bytes(parts.payload, size, plan.shares_shard(rank))
            parts = ShardList.unpack(data)
        return self._even_out(theirs, parts)

    def _summaries(self) -> list[_Summary]:
        mine, parts = self._mine, self._parts
        data = _SUMMARY.pack(mine.digest(), len(mine.payload), parts.digest(), len(parts.payload))
        return [_Summary(*_SUMMARY.unpack(one)) for one in self._wire.all_gather_bytes(data)]

    def _are_alike(self, summaries: Sequence[_Summary]) -> bool:
        plan = self._plan
        return not any(header.is_cold for header in plan.headers) and all(
            one.whole == summaries[plan.source].whole
            and one.shards == summaries[plan.shard_source(rank)].shards
            for rank, one in enumerate(summaries)
        )

    def _even_out(self, theirs: Description, parts: ShardList) -> _Done:
        """Find out who lacks what of the sources' states, and send that."""
        lacks = self._lacks(theirs, parts)
        drift, drifted = self._check_divergence(lacks, theirs, parts)
        plan, rank = self._plan, self._wire.rank
        whole, shards = lacks.by(rank)
        if whole or shards:
            self._state.dirty = True
            if plan.headers[rank].is_cold:  # what arrives can be compared, should this sync fail
                self._state.lineage = plan.headers[plan.source].lineage
        own = self._leaves
        sent = _Sending(self._wire, lacks, plan)
        taken = sent.run(plan.source, range(self._wire.size), own.tensors, theirs.metas)
        local = {path: local_of(tensor) for path, tensor in own.shards.items()}
        ranks = plan.shares_shard(rank)
        taken |= sent.run(ranks[0], ranks, local, parts.metas)
        self._load(theirs, own, taken, whole)
        took = tuple(at for at, flags in enumerate(lacks.flags) if any(flags))
        return _Done(took, sent.tensors, sent.nbytes, drift, drifted)

    def _lacks(self, theirs: Description, parts: ShardList) -> _Lacks:
        plan, rank = self._plan, self._wire.rank
        places, shards = theirs.places(), list(theirs.wholes)
        mine = [False] * len(places)
        if rank != plan.source:
            mine = self._mine.differences(theirs)
        if rank == plan.shard_source(rank):
            mine += [False] * len(shards)
        else:
            mine += self._parts.differences(parts)
        return _Lacks(places, shards, self._wire.all_gather_bytes(bytes(mine)))

    def _check_divergence(
        self, lacks: _Lacks, theirs: Description, parts: ShardList
    ) -> tuple[float, str]:
        """Refuse differences of members that have the source's version, but for drift.

        Returns how far the tensor has drifted that has drifted most, and which one that is.
        """
        apart = self._apart(lacks)
        metas = {**theirs.metas, **parts.metas}
        for path, ranks in apart.items():
            if not self._drift or not _is_float(metas.get(path)):
                raise self._divergence(path, ranks, "")
        own = {**self._leaves.tensors, **{p: local_of(t) for p, t in self._leaves.shards.items()}}
        plan, sharded = self._plan, set(lacks.shards)
        pairs = {
            path: [
                (rank, plan.shard_source(rank) if path in sharded else plan.source)
                for rank in ranks
            ]
            for path, ranks in apart.items()
        }
        most = (0.0, "")
        for path, distance in distances(self._wire, own, pairs).items():
            if not distance <= self._drift:  # nor NaN
                how = f" by {distance:.2g} of its norm, more than drift={self._drift:g}"
                raise self._divergence(path, apart[path], how)
            most = max(most, (distance, path))
        return most

    def _apart(self, lacks: _Lacks) -> dict[str, tuple[int, ...]]:
        """By path, in order: ranks that differ there from their source, and should not."""
        peers, free = self._plan.peers(), self._state.free_paths()
        found: dict[str, tuple[int, ...]] = {}
        for index, path in enumerate([*lacks.places, *lacks.shards]):
            ranks = tuple(rank for rank in peers if lacks.flags[rank][index])
            if ranks and path not in free:
                found[path] = ranks
        return found

    def _divergence(self, path: str, ranks: tuple[int, ...], how: str) -> DivergenceError:
        plan = self._plan
        return DivergenceError(
            f"sync: {path}: ranks {list(ranks)} differ from rank {plan.source}{how}, though "
            f"all have committed step {plan.headers[plan.source].step}; go back to a "
            "checkpoint",
            path=path,
            ranks=ranks,
        )

    def _load(
        self, theirs: Description, own: Leaves, taken: dict[str, torch.Tensor], lacks: set[str]
    ) -> None:
        """Let objects take what did not go into their memory."""
        for name, data in theirs.parts.items():
            paths = tensor_paths(name, data, self._state.allow_pickle)
            received = [taken[path] for path in paths if path in taken]
            in_place = _written_in_place(self._state.objects[name], received)
            if name in lacks or (received and not in_place):
                load(self._state, name, data, own.updated(taken, theirs.wholes))


class _Sending:
    """The transfers of one exchange, counted."""

    def __init__(self, wire: Wire, lacks: _Lacks, plan: _Plan) -> None:
        self._wire = wire
        self._lacks = [set().union(*lacks.by(rank)) for rank in range(wire.size)]
        self._plan = plan
        self.tensors = 0
        self.nbytes = 0

    def run(
        self,
        source: int,
        ranks: Sequence[int],
        own: Mapping[str, torch.Tensor],
        metas: Mapping[str, TensorMeta],
    ) -> dict[str, torch.Tensor]:
        """Send those of these tensors that one of these ranks lacks; return what this one took."""
        takers = [rank for rank in ranks if self._lacks[rank] & metas.keys()]
        wanted = set().union(*(self._lacks[rank] for rank in takers))
        metas = {path: meta for path, meta in metas.items() if path in wanted}
        self.tensors += len(metas)
        self.nbytes += sum(meta.nbytes() for meta in metas.values())
        mine = self._lacks[self._wire.rank]
        return Transfer(self._wire, [source, *takers], own, metas, mine).run()


def _is_float(meta: TensorMeta | None) -> bool:
    """Its values come from arithmetic that processors round in ways of their own."""
    return meta is not None and (
        meta.torch_dtype().is_floating_point or meta.torch_dtype().is_complex
    )


def _written_in_place(value: object, taken: Sequence[torch.Tensor]) -> bool:
    """These tensors are the object's own memory, so that it need not load them."""
    memory = {tensor.data_ptr() for tensor in memory_of(value)}
    return all(tensor.data_ptr() in memory for tensor in taken)
