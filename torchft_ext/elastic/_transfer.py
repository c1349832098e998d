"""Sends chosen tensors from one member to those that lack them, from each to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchft_ext.elastic._codec import TensorMeta
from torchft_ext.elastic._fingerprint import flat_bytes
from torchft_ext.elastic._wire import Wire

__all__ = ["Piece", "Transfer", "buckets"]

BUCKET_BYTES = 8 << 20
_PACKED_BELOW = 8  # tensors of less than a bucket's eighth share buckets: packing copies
_AHEAD = 3  # buckets that are asked for, and that are under way to the next member, at once

Piece = tuple[str, int, int]  # path of a tensor, first byte, end


def buckets(sizes: Mapping[str, int], limit: int = BUCKET_BYTES) -> Iterator[list[Piece]]:
    """Cut tensors into pieces, and put these into buckets, in order.

    A tensor of an eighth of a bucket or more has buckets of its own, which need no packing; others
    share buckets.

    Args:
        sizes: bytes of each tensor.
        limit: bytes of a bucket.
    """
    bucket: list[Piece] = []
    room = limit
    for path, size in sizes.items():
        alone = size * _PACKED_BELOW >= limit
        if bucket and (alone or size > room):
            yield bucket
            bucket, room = [], limit
        if alone:
            yield from ([(path, at, min(size, at + limit))] for at in range(0, size, limit))
        elif size:
            bucket.append((path, 0, size))
            room -= size
    if bucket:
        yield bucket


class Transfer:
    """One sending of tensors along a pipeline, as bytes in buckets of up to 8 MiB; used once.

    The source sends each bucket to the first that takes, which passes it on to the next while it
    receives others: several members take as fast as one does. Others have no part in it. A
    bucket within one tensor goes straight from its memory and into it, where that is contiguous
    and on a device that the group serves; others are packed. A sync owns it for one call. Threads:
    one at a time. After a CommError, tensors to be taken may be half written.
    """

    def __init__(
        self,
        wire: Wire,
        chain: Sequence[int],
        own: Mapping[str, torch.Tensor],
        metas: Mapping[str, TensorMeta],
        take: Set[str],
    ) -> None:
        """Say what is sent, and what of it this member lacks.

        Args:
            wire: of the view.
            chain: the rank that sends, then those that lack something, in the order of passing on.
            own: this member's tensors, by path; on the source all that are sent.
            metas: what the source's tensors are like, by path, in the same order on all members.
            take: paths that this member lacks; on the source none.
        """
        self._wire = wire
        self._metas = metas
        self._take = [path for path in metas if path in take]
        place = chain.index(wire.rank) if wire.rank in chain else None
        self._takes_part = place is not None and len(chain) > 1
        self._sends = place == 0
        self._before = chain[place - 1] if place else 0  # not read on the source
        self._after = None if place is None else next(iter(chain[place + 1 :]), None)
        self._outgoing = _Outgoing(wire, own)
        self._incoming = {path: _Incoming(wire, own.get(path), metas[path]) for path in self._take}

    def run(self) -> dict[str, torch.Tensor]:
        """Send; blocks until this member has passed everything on.

        Returns:
            What was taken, by path: this member's own tensor, written in place, where it is of
            the same dtype, shape and type of device; else a new one.
        """
        if not self._takes_part:
            return {}
        travel = {path: self._wire.device_type(meta.device) for path, meta in self._metas.items()}
        for device in sorted(set(travel.values())):
            sizes = {p: self._metas[p].nbytes() for p in travel if travel[p] == device}
            self._pass_through(buckets(sizes), device)
        return {path: self._incoming[path].finish() for path in self._take}

    def _pass_through(self, ordered: Iterator[list[Piece]], device: str) -> None:
        """Buckets are asked for ahead, and go on while others come."""
        ahead = 0 if self._sends else _AHEAD
        scratch = [_Scratch(device) for _ in range(ahead + _AHEAD + 1)]  # as many are in use
        coming: deque[_Arrival] = deque()
        going: deque[tuple[dist.Work, torch.Tensor]] = deque()
        for number, bucket in enumerate(ordered):
            coming.append(self._begin(bucket, scratch[number % len(scratch)]))
            if len(coming) > ahead:
                self._pass_on(coming.popleft(), going)
        while coming:
            self._pass_on(coming.popleft(), going)
        for work, _ in going:
            work.wait()

    def _pass_on(self, arrival: _Arrival, going: deque[tuple[dist.Work, torch.Tensor]]) -> None:
        arrival.complete()
        if self._after is None:
            return
        if len(going) == _AHEAD:
            going.popleft()[0].wait()
        going.append((self._wire.isend(arrival.buffer, self._after), arrival.buffer))

    def _begin(self, bucket: list[Piece], scratch: _Scratch) -> _Arrival:
        """Pack the bucket on the source; begin to receive it elsewhere."""
        parts = [self._bytes_of(piece) for piece in bucket]
        sizes = [end - start for _, start, end in bucket]
        direct = parts[0] if len(parts) == 1 else None
        buffer = scratch.take(sum(sizes)) if direct is None else direct
        slots = [] if direct is not None else zip(buffer.split(sizes), parts, strict=True)
        pairs = [(slot, part) for slot, part in slots if part is not None]
        if not self._sends:
            return _Arrival(buffer, self._wire.irecv(buffer, self._before), pairs)
        for slot, part in pairs:
            slot.copy_(part)
        return _Arrival(buffer, None, [])

    def _bytes_of(self, piece: Piece) -> torch.Tensor | None:
        """Where these bytes lie or go on this member; None where it neither sends nor lacks."""
        path, start, end = piece
        if self._sends:
            return self._outgoing.flat(path)[start:end]
        incoming = self._incoming.get(path)
        return None if incoming is None else incoming.flat[start:end]


@dataclass(frozen=True)
class _Arrival:
    """A bucket that comes, or is here.

    Attributes:
        buffer: where its bytes lie, or will.
        work: of the receiving; None: they are here.
        pairs: parts of the buffer, and where each goes.
    """

    buffer: torch.Tensor
    work: dist.Work | None
    pairs: list[tuple[torch.Tensor, torch.Tensor]]

    def complete(self) -> None:
        """Wait for the bytes, and take them."""
        if self.work is not None:
            self.work.wait()
        for slot, part in self.pairs:
            part.copy_(slot)


class _Scratch:
    """A buffer for packing, made on its first use and used again."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffer[:size]


class _Outgoing:
    """The source's tensors as bytes; keeps only the copy that was made last."""

    def __init__(self, wire: Wire, own: Mapping[str, torch.Tensor]) -> None:
        self._wire = wire
        self._own = own
        self._last: tuple[str, torch.Tensor] | None = None

    def flat(self, path: str) -> torch.Tensor:
        if self._last is None or self._last[0] != path:
            tensor = self._own[path]
            device = self._wire.device_type(tensor.device.type)
            data = flat_bytes(tensor)
            self._last = path, data if device == data.device.type else data.to(device)
        return self._last[1]


class _Incoming:
    """One tensor that is received: into its own memory, or into a buffer beside it.

    Attributes:
        flat: `[nbytes]`, uint8, contiguous: where the bytes go.
    """

    def __init__(self, wire: Wire, own: torch.Tensor | None, meta: TensorMeta) -> None:
        self._own = own if own is not None and TensorMeta.of(own) == meta else None
        self._meta = meta
        device = wire.device_type(meta.device)
        if self._own is not None and meta.device == device and _is_plain(self._own):
            self.flat = flat_bytes(self._own)
        else:
            self.flat = torch.empty(meta.nbytes(), dtype=torch.uint8, device=device)

    @torch.no_grad()
    def finish(self) -> torch.Tensor:
        """The tensor, once all bytes are here."""
        dense = self.flat.view(self._meta.torch_dtype()).view(self._meta.shape)
        if self._own is None:
            return dense if dense.device.type == self._meta.device else dense.to(self._meta.device)
        if self._own.data_ptr() != self.flat.data_ptr():
            self._own.copy_(dense)
        return self._own


def _is_plain(tensor: torch.Tensor) -> bool:
    """Its bytes lie in memory as flat_bytes() gives them."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
