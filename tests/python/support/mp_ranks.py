"""Ranks that multiprocessing starts, one of which returns before the others.

Usage: python mp_ranks.py METHOD STORE_FILE [early] [other]
early: torchft_ext is imported before they are started.
other: the one that returns has chosen "spawn" for children of its own.
Prints what each of the others saw, as JSON: {rank: [error or null, error]}, of a message among them
and of one from the rank that has returned.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Event
from typing import NamedTuple

import torch
import torch.distributed as dist
from rankside import PATIENCE, failure_of, seconds
from values import check_sum

WORLD = 3
LEAVER = 2


class Shared(NamedTuple):
    """What the ranks have in common with who starts them."""

    ended: Event  # the leaver has
    talked: Barrier  # the others have, to each other
    answers: Queue


def be_a_rank(rank: int, store: str, other: bool, shared: Shared) -> None:
    limit = seconds(PATIENCE)
    dist.init_process_group("ft", f"file://{store}", rank=rank, world_size=WORLD, timeout=limit)
    check_sum()
    if rank != LEAVER:
        shared.answers.put((rank, seen_after_the_end_of_another(rank, shared)))
    elif other:
        multiprocessing.set_start_method("spawn", force=True)


def seen_after_the_end_of_another(rank: int, shared: Shared) -> list[str | None]:
    """The second error tells whether it said goodbye or is taken for dead."""
    if not shared.ended.wait(PATIENCE):
        return ["the other one did not end"]
    tensor = torch.ones(3)
    errors = [failure_of(lambda: dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0))]
    shared.talked.wait(PATIENCE)
    errors.append(failure_of(lambda: dist.recv(tensor, LEAVER)))
    return [None if error is None else error.type for error in errors]


def main(method: str, store: str, *how: str) -> None:
    context = multiprocessing.get_context(method)
    if "early" in how:
        import torchft_ext  # noqa: F401

        context.set_forkserver_preload(["torchft_ext"])
    shared = Shared(context.Event(), context.Barrier(WORLD - 1), context.Queue())
    processes = [
        context.Process(target=be_a_rank, args=(rank, store, "other" in how, shared), daemon=True)
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    processes[LEAVER].join(PATIENCE)
    shared.ended.set()
    print(json.dumps(dict(shared.answers.get(timeout=PATIENCE) for _ in range(WORLD - 1))))
    for process in processes:
        process.join(PATIENCE)


if __name__ == "__main__":
    main(*sys.argv[1:])
