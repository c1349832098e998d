"""Memory that malloc() has given out, and that is mapped beside it."""

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


def private_bytes() -> int:
    """Private memory without a file: stacks, arenas, what is mapped for no allocator of libc's.

    Adjacent mappings are merged into one, so it is their bytes that tell, not their number.
    """
    total = 0
    with open("/proc/self/maps") as file:
        for line in file:
            span, access, _, _, inode, *name = line.split(maxsplit=5)
            if access.endswith("p") and access != "---p" and inode == "0" and name != ["[heap]\n"]:
                first, last = (int(part, 16) for part in span.split("-"))
                total += last - first
    return total
