"""Memory that a group shares with its child process.

One anonymous file (memfd) for each child, made before it starts and inherited by descriptor. Its
size is fixed, 64 GiB where address space allows: pages are there once they are touched. What lies
beyond KEPT goes back to the system when its operation has ended. So there is nothing to grow, and
tensors of several gigabytes need no pieces. A new child gets a new arena: one that was killed, and
is not gone yet, cannot write into the next generation's.

Owners: the child owns its arena; each operation owns its room in it. The file goes when the last of
parent and child has.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
import resource
import threading
from contextlib import suppress

import torch

SIZES = (1 << 36, 1 << 33, 1 << 30, 1 << 28)  # bytes; the first that address space is there for
KEPT = 64 << 20  # bytes at the arena's beginning, whose pages stay
_ALIGNED = 64
_PAGE = mmap.PAGESIZE
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Arena:
    """Shared memory, and what of it is free. Threads: any; nothing blocks."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("torchft_ext-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._memory = self._mapped()
        except BaseException:
            os.close(self.fd)
            raise
        self.size = len(self._memory)
        self.address = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        self._lock = threading.Lock()
        self._free = [(0, self.size)]  # offset and length, by offset, never adjacent

    def _mapped(self) -> mmap.mmap:
        for size in SIZES:
            with suppress(OSError):  # no address space, or a limit of files, for that much
                os.ftruncate(self.fd, size)
                memory = mmap.mmap(self.fd, size, mmap.MAP_SHARED)
                memory.madvise(mmap.MADV_DONTDUMP)
                # A file that shrinks would kill whoever touches what is gone.
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
                return memory
        raise MemoryError(
            f"no {_lacking(SIZES[-1])} for {SIZES[-1] >> 20} MiB that a child process shares"
        )

    def close(self) -> None:
        """Close the file; the memory stays as long as tensors in it do."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def take(self, count: int) -> int:
        """Return the offset of so many free bytes, the first that are.

        Raises:
            MemoryError: there are not so many in one place.
        """
        length = _rounded(count)
        with self._lock:
            for place, (offset, free) in enumerate(self._free):
                if free < length:
                    continue
                if free == length:
                    del self._free[place]
                else:
                    self._free[place] = (offset + length, free - length)
                return offset
        raise MemoryError(
            f"the memory shared with the child process has {self.size} B, of which {count} in one "
            "place are wanted: wait for operations before issuing more"
        )

    def give(self, offset: int, count: int) -> None:
        """Take bytes back."""
        length = _rounded(count)
        self._forget(offset, length)
        with self._lock:
            place = bisect.bisect_left(self._free, (offset, 0))
            if place < len(self._free) and self._free[place][0] == offset + length:
                length += self._free.pop(place)[1]
            if place > 0 and sum(self._free[place - 1]) == offset:
                before, free = self._free[place - 1]
                self._free[place - 1] = (before, free + length)
            else:
                self._free.insert(place, (offset, length))

    def _forget(self, offset: int, length: int) -> None:
        """Give pages beyond KEPT back to the system."""
        begin = max(-(-offset // _PAGE) * _PAGE, KEPT)
        end = (offset + length) // _PAGE * _PAGE
        if begin < end:
            # Where the system cannot (locked memory), they stay. Not mmap's, which keeps the GIL.
            _madvise(self.address + begin, end - begin, mmap.MADV_REMOVE)

    def tensor(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose memory begins there; it must not be empty."""
        flat = torch.frombuffer(self._memory, dtype=dtype, count=shape.numel(), offset=offset)
        return flat.view(shape)

    def span_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return offset and length of a contiguous tensor that lies in it."""
        count = tensor.numel() * tensor.element_size()
        return (tensor.data_ptr() - self.address if count else 0), count


class ArenaRoom:
    """Room in an arena for the copies of one operation. One thread at a time."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._taken: list[tuple[int, int]] = []

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        count = shape.numel() * dtype.itemsize
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        offset = self._arena.take(count)
        self._taken.append((offset, count))
        return self._arena.tensor(offset, shape, dtype)

    def release(self) -> None:
        taken, self._taken = self._taken, []
        for offset, count in taken:
            self._arena.give(offset, count)


def _lacking(size: int) -> str:
    """Name the limit that keeps memory of that size from this process."""
    for which, word, option in (
        (resource.RLIMIT_FSIZE, "file size", "f"),
        (resource.RLIMIT_AS, "address space", "v"),
    ):
        limit = resource.getrlimit(which)[0]
        used = _address_space() if which == resource.RLIMIT_AS else 0
        if limit != resource.RLIM_INFINITY and used + size > limit:
            return (
                f"{word} left (the limit is {limit >> 20} MiB: raise it with ulimit -{option}, or "
                "use ProcessGroupHost or ProcessGroupGloo, which need none)"
            )
    return "address space"


def _address_space() -> int:
    """Return the bytes of address space that this process has."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * _PAGE


def _rounded(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
