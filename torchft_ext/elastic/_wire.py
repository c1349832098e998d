"""Bytes and tensors over the process group of one view."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["Wire"]


class Wire:
    """The collectives that a sync needs, on whatever devices the group serves.

    sync() owns it for one call. All members call the same methods in the same order. Threads: one
    at a time. After an abort of the group, methods raise CommError.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self._types = [device.type for device in group._device_types]

    def device_type(self, wanted: str) -> str:
        """Return the type of device by which tensors of this type travel."""
        if wanted in self._types:
            return wanted
        return "cpu" if "cpu" in self._types else self._types[0]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by rank; equally many from each."""
        mine = self._tensor_of(data)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self.group)
        return [bytes(tensor.tolist()) for tensor in gathered]

    def broadcast_bytes(self, data: bytes, size: int, source: int) -> bytes:
        """Return the source's bytes.

        Args:
            data: on the source, `size` bytes; not read elsewhere.
            size: known to all.
            source: its rank.
        """
        if self.rank == source:
            self.broadcast(self._tensor_of(data), source)
            return data
        buffer = self._empty(size)
        self.broadcast(buffer, source)
        return _bytes_of(buffer)

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """Send a contiguous uint8 tensor from the source to all, in place."""
        dist.broadcast(buffer, group_src=source, group=self.group)

    def share_bytes(self, data: bytes, size: int, ranks: Sequence[int]) -> bytes:
        """Return the bytes of the first of these ranks; called by all of them, and by no other.

        Args:
            data: on the first, `size` bytes; not read elsewhere.
            size: known to all of them.
            ranks: the source and those that take.
        """
        if self.rank == ranks[0]:
            buffer = self._tensor_of(data)
            for sending in [self.isend(buffer, rank) for rank in ranks[1:]]:
                sending.wait()
            return data
        buffer = self._empty(size)
        self.irecv(buffer, ranks[0]).wait()
        return _bytes_of(buffer)

    def isend(self, buffer: torch.Tensor, to: int) -> dist.Work:
        """Begin to send a contiguous uint8 tensor to that rank; it is not changed until wait()."""
        work = dist.isend(buffer, group=self.group, group_dst=to)
        assert work is not None  # this rank is in the group
        return work

    def irecv(self, buffer: torch.Tensor, source: int) -> dist.Work:
        """Begin to receive a contiguous uint8 tensor from that rank, in place."""
        work = dist.irecv(buffer, group=self.group, group_src=source)
        assert work is not None
        return work

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device_type("cpu"))

    def _tensor_of(self, data: bytes) -> torch.Tensor:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return tensor.to(self.device_type("cpu"))


def _bytes_of(buffer: torch.Tensor) -> bytes:
    here = buffer.cpu()
    return ctypes.string_at(here.data_ptr(), here.numel())  # numpy may not be installed
