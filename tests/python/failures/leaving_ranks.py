"""Ranks of small healthy programs that leave in a given order, and what they write on stderr.

Usage: python leaving_ranks.py CASE...
CASE: WAY/ORDER. WAY: a function below. ORDER: "201" (one after the other, each when the one before
has ended; such cases run side by side) or "all" (at once).
Prints [[case, what its ranks wrote, by rank], ...] as JSON. The ranks are forked from a process
that has imported torch and started nothing: a fresh interpreter for each costs seconds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from ports import free_ports
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


def let_leave(ranks: list[Rank]) -> None:
    """At the same time."""
    for rank in ranks:
        rank.let_go()
    for rank in ranks:
        rank.wait()


def written_in(cases: list[str]) -> list[list[str]]:
    """Of a single case in which all leave at once; or of some, side by side, of the others."""
    ways, orders = zip(*(case.split("/") for case in cases), strict=True)
    worlds = [
        [Rank(rank, port, way) for rank in range(WORLD)]
        for way, port in zip(ways, free_ports(len(cases)), strict=True)
    ]
    if orders == ("all",):
        let_leave(worlds[0])
    else:
        for numbers in zip(*orders, strict=True):
            let_leave([ranks[int(n)] for ranks, n in zip(worlds, numbers, strict=True)])
    return [[rank.written() for rank in ranks] for ranks in worlds]


def main(cases: list[str]) -> None:
    alone = [case for case in cases if case.endswith("/all")]
    together = [case for case in cases if case not in alone]
    written = [(case, written_in([case])[0]) for case in alone]
    if together:
        written += zip(together, written_in(together), strict=True)
    print(json.dumps(written))


if __name__ == "__main__":
    main(sys.argv[1:])
