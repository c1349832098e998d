"""Gives the members of a view one state: who has it sends, who lacks something takes it."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from torchft_ext.elastic._codec import TensorMeta, decode
from torchft_ext.elastic._description import Description
from torchft_ext.elastic._errors import DivergenceError, ElasticError
from torchft_ext.elastic._state import State, memory_of
from torchft_ext.elastic._transfer import Transfer
from torchft_ext.elastic._versions import Header, check_names, choose_source
from torchft_ext.elastic._wire import Wire

__all__ = ["SyncReport", "sync"]

_SUMMARY = struct.Struct("<16sq")


@dataclass(frozen=True)
class SyncReport:
    """What a sync did; the same on all members but for `elapsed`.

    Attributes:
        source: rank of the member whose state it is now.
        step: how many steps are committed in it.
        took: ranks that took something from the source.
        tensors: how many were sent.
        nbytes: their size; to each member once.
        elapsed: on this member.
    """

    source: int
    step: int
    took: tuple[int, ...]
    tensors: int
    nbytes: int
    elapsed: timedelta


def sync(
    state: State,
    group: dist.ProcessGroup,
    *,
    continuing: bool,
    lineage: bytes,
    step: int,
    dirty: bool,
    allow_pickle: bool = False,
) -> SyncReport:
    """Make the state of all members of a view bit-identical.

    Blocks, in collectives; all members call it. The source is, among the clean members that
    continue, one of the highest step, the lowest rank of these; where nobody continues, the same
    among all that are clean. Members compare versions and hashes; a tensor travels only where some
    member differs from the source in it. A dirty newcomer without a lineage takes everything, and
    hashes nothing; nor does the source where there are only such. While something of the state is
    overwritten the state is dirty, and stays so when that fails.

    Args:
        state: its objects have the same names and order on all members.
        group: of the view, formed.
        continuing: this member has held the job's state since the last view.
        lineage: 16 bytes; with `step` the version of this member's state.
        step: how many steps are committed in it.
        dirty: this member must not be the source.
        allow_pickle: leaves of other types travel by pickle.

    Returns:
        What was done. The state's step is that of the source, and it is clean.

    Raises:
        StateLostError: no member is clean, or none of those that continue. On all members.
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
    header = Header(continuing, dirty, step, lineage, _digest_of_names(state))
    headers = [Header.unpack(data) for data in wire.all_gather_bytes(header.pack())]
    check_names(headers, wire.rank, state.names)
    source = choose_source(headers)
    hashed = sum(not other.is_cold for other in headers) > 1 and not header.is_cold
    mine = Description.of(encoded, hashed=hashed)
    done = _Exchange(state, wire, mine, headers, source).run()
    state.step = headers[source].step
    state.dirty = False
    elapsed = timedelta(seconds=time.monotonic() - began)
    return SyncReport(source, state.step, done.took, done.tensors, done.nbytes, elapsed)


def _digest_of_names(state: State) -> bytes:
    return blake2b(repr(state.names).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class _Done:
    """What an exchange sent, and to whom."""

    took: tuple[int, ...] = ()
    tensors: int = 0
    nbytes: int = 0


class _Exchange:
    """The part of a sync in which members differ: find out where, send that, load it."""

    def __init__(
        self, state: State, wire: Wire, mine: Description, headers: Sequence[Header], source: int
    ) -> None:
        self._state = state
        self._wire = wire
        self._mine = mine
        self._headers = headers
        self._source = source

    def run(self) -> _Done:
        summaries = self._summaries()
        alike = all(digest == summaries[self._source][0] for digest, _ in summaries)
        if alike and not any(header.is_cold for header in self._headers):
            return _Done()
        size = summaries[self._source][1]
        payload = self._wire.broadcast_bytes(self._mine.payload, size, self._source)
        theirs = Description.unpack(payload, allow_pickle=self._state.allow_pickle)
        return self._even_out(theirs)

    def _summaries(self) -> list[tuple[bytes, int]]:
        """Digest and size of each member's description."""
        mine = _SUMMARY.pack(self._mine.digest(), len(self._mine.payload))
        return [_SUMMARY.unpack(data) for data in self._wire.all_gather_bytes(mine)]

    def _even_out(self, theirs: Description) -> _Done:
        """Find out who lacks what of the source's state, and send that."""
        places = theirs.places()
        rank = self._wire.rank
        mine = self._mine.differences(theirs) if rank != self._source else [False] * len(places)
        differs = self._wire.all_gather_bytes(bytes(mine))
        self._check_divergence(places, differs)
        lacks = {places[index] for index, flag in enumerate(mine) if flag}
        wanted = [
            path
            for index, path in enumerate(places)
            if path in theirs.metas and any(flags[index] for flags in differs)
        ]
        if lacks:
            self._state.dirty = True
        nbytes = self._move(theirs, wanted, lacks)
        took = tuple(at for at, flags in enumerate(differs) if any(flags))
        return _Done(took, len(wanted), nbytes)

    def _check_divergence(self, places: list[str], differs: Sequence[bytes]) -> None:
        version, free = self._headers[self._source].version, self._state.free_paths()
        peers = [
            rank
            for rank, header in enumerate(self._headers)
            if header.holds_state and header.version == version
        ]
        for index, path in enumerate(places):
            ranks = tuple(rank for rank in peers if differs[rank][index])
            if ranks and path not in free:
                raise DivergenceError(
                    f"sync: {path}: ranks {list(ranks)} differ from rank {self._source}, though "
                    f"all have committed step {version[1]}; go back to a checkpoint",
                    path=path,
                    ranks=ranks,
                )

    def _move(self, theirs: Description, wanted: list[str], lacks: set[str]) -> int:
        """Send what somebody wants, and load what this member lacks. Returns the bytes sent."""
        metas = {path: theirs.metas[path] for path in wanted}
        own = self._own_tensors()
        taken = Transfer(self._wire, self._source, own, metas, lacks).run()
        for name, data in theirs.parts.items():
            paths = _tensor_paths(name, data, self._state.allow_pickle)
            received = [taken[path] for path in paths if path in taken]
            in_place = _written_in_place(self._state.objects[name], received)
            if name in lacks or (received and not in_place):
                self._load(name, data, {**own, **taken})
        return sum(meta.nbytes() for meta in metas.values())

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        parts = self._state.encode().values()
        return {path: tensor for part in parts for path, tensor in part.tensors.items()}

    def _load(self, name: str, data: bytes, leaves: dict[str, torch.Tensor]) -> None:
        """Let an object take the state, and see that it did."""
        state = self._state
        tree: Any = decode(
            data, name, lambda path, _: leaves[path], allow_pickle=state.allow_pickle
        )
        state.load(name, tree)
        if state.encode_one(name).data != data:
            raise ElasticError(f"sync: {name}: load_state_dict() did not take the state whole")


def _tensor_paths(name: str, data: bytes, allow_pickle: bool) -> list[str]:
    """Of one encoded object."""
    metas: dict[str, TensorMeta] = {}
    decode(data, name, metas.__setitem__, allow_pickle=allow_pickle)
    return list(metas)


def _written_in_place(value: object, taken: Sequence[torch.Tensor]) -> bool:
    """These tensors are the object's own memory, so that it need not load them."""
    memory = {tensor.data_ptr() for tensor in memory_of(value)}
    return all(tensor.data_ptr() in memory for tensor in taken)
