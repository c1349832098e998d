"""Ranks of small healthy programs that leave in a given order, and what they write on stderr.

Usage: python leaving_ranks.py CASE...
CASE: WAY/ORDER. WAY: a function below. ORDER: "201" (one after the other, each when the one before
has ended) or "all" (at once).
Prints [[case, what its ranks wrote, by rank], ...] as JSON. The ranks are forked from a process
that has imported torch and started nothing: a fresh interpreter for each costs seconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from rankside import PATIENCE, seconds

WORLD = 3


def destroy() -> None:
    dist.destroy_process_group()


def shut_down() -> None:
    import torchft_ext

    torchft_ext.backend().shutdown()


def just_end() -> None:
    """The interpreter ends with all groups there."""


def sys_exit() -> None:
    sys.exit(0)


def destroy_and_die() -> None:
    dist.destroy_process_group()
    os._exit(0)


WAYS: dict[str, Callable[[], None]] = {
    way.__name__: way for way in (destroy, shut_down, just_end, sys_exit, destroy_and_die)
}


def be_a_rank(rank: int, port: int, way: str, go: int) -> None:
    """As a program that torchrun has not started: rank 0 has the store."""
    place = f"tcp://127.0.0.1:{port}"
    limit = seconds(PATIENCE)
    dist.init_process_group("ft", place, rank=rank, world_size=WORLD, timeout=limit)
    dist.all_reduce(torch.ones(3))
    for members in ([0, 1], [1, 2]):  # one without the rank that has the store
        subgroup = dist.new_group(members)
        if rank in members:
            dist.all_reduce(torch.ones(3), group=subgroup)
    dist.barrier()  # all have their groups, for which they needed the store
    os.read(go, 1)
    WAYS[way]()


class Rank:
    """A forked process; the parent's side of it."""

    def __init__(self, rank: int, port: int, way: str) -> None:
        self.stderr = tempfile.TemporaryFile()
        reading, self._go = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.dup2(self.stderr.fileno(), 2)
            be_a_rank(rank, port, way, reading)
            sys.exit(0)  # by the interpreter's own end
        os.close(reading)

    def let_go(self) -> None:
        with suppress(BrokenPipeError):  # it has ended, and wait() says how
            os.write(self._go, b"!")
        os.close(self._go)

    def wait(self) -> None:
        _, status = os.waitpid(self._pid, 0)
        assert status == 0, (status, self.written())

    def written(self) -> str:
        self.stderr.seek(0)
        return self.stderr.read().decode()


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def written_in(case: str) -> list[str]:
    way, order = case.split("/")
    port = free_port()
    ranks = [Rank(rank, port, way) for rank in range(WORLD)]
    if order == "all":
        for rank in ranks:
            rank.let_go()
        for rank in ranks:
            rank.wait()
    else:
        for number in order:
            ranks[int(number)].let_go()
            ranks[int(number)].wait()
    return [rank.written() for rank in ranks]


if __name__ == "__main__":
    print(json.dumps([[case, written_in(case)] for case in sys.argv[1:]]))
