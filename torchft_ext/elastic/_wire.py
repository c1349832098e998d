"""Bytes and tensors over the process group of one view."""

from __future__ import annotations

import ctypes

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
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device_type("cpu"))
        self.broadcast(buffer, source)
        here = buffer.cpu()
        return ctypes.string_at(here.data_ptr(), size)  # numpy may not be installed

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """Send a contiguous uint8 tensor from the source to all, in place."""
        dist.broadcast(buffer, group_src=source, group=self.group)

    def _tensor_of(self, data: bytes) -> torch.Tensor:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return tensor.to(self.device_type("cpu"))
