"""Memory that malloc() has given out."""

from __future__ import annotations

import ctypes


class HeapUse(ctypes.Structure):
    """glibc's mallinfo2, over all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_bytes() -> int:
    """What is allocated; the pages it lies on tell of fragments and huge pages as well."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = HeapUse
    use = mallinfo2()
    return use.uordblks + use.hblkhd
