"""A program for namespaces.py: groups are formed over a store whose host has a name server that
never answers."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import torch.distributed as dist
from namespaces import NAME_SERVER
from ranks import Pool, World, values_of
from rankside import configure, connected_store, kept, leave_default_group, seconds

SIZE = 4


def come(address: str) -> None:
    """Connect to the store, which asks for a name."""
    leave_default_group()
    kept["store"] = connected_store(address)


def form(rank: int, size: int) -> float:
    began = time.monotonic()
    store = kept["store"]
    dist.init_process_group("ft", store=store, rank=rank, world_size=size, timeout=seconds(60))
    return time.monotonic() - began


def form_again(address: str, rank: int, size: int) -> float:
    began = time.monotonic()
    configure(address, rank, size)
    return time.monotonic() - began


def form_another(rank: int, size: int) -> float:
    began = time.monotonic()
    dist.new_group(list(range(size)), timeout=seconds(60))
    return time.monotonic() - began


class SilentServer:
    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((NAME_SERVER, 53))
        self._socket.setblocking(False)

    def questions(self) -> int:
        """How many came since the last call."""
        count = 0
        while True:
            try:
                self._socket.recv(2048)
            except BlockingIOError:
                return count
            count += 1


def main(folder: Path) -> dict:
    names = SilentServer()
    pool = Pool(folder, dict(os.environ))
    world = World(pool, pool.borrow(SIZE))
    address = pool.address()
    values_of([world.start(rank, come, address) for rank in range(SIZE)])
    while_coming = names.questions()
    took = {}
    for name, function, first in (
        ("first", form, ()),
        ("again", form_again, (pool.address(),)),
        ("another", form_another, ()),
    ):
        calls = [world.start(rank, function, *first, rank, SIZE) for rank in range(SIZE)]
        took[name] = max(values_of(calls))
    questions = names.questions()
    pool.close()
    return {"took": took, "while_coming": while_coming, "while_forming": questions}
