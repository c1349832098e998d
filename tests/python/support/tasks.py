"""The threads of a process, as the kernel lists them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def thread_names(pid: int | str = "self") -> dict[int, str]:
    """By thread id. A thread that ends meanwhile is left out."""
    names = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            names[int(task.name)] = (task / "comm").read_text().strip()
    return names
