"""Ranks that multiprocessing starts, one of which returns before the others.

Usage: python mp_ranks.py METHOD STORE_FILE [early] [other]
early: torchft_ext is imported before they are started.
other: the one that returns has chosen "spawn" for children of its own.
Prints what each of the others saw, as JSON: {rank: the error or null}.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time

import torch
import torch.distributed as dist
from rankside import PATIENCE, failure_of, seconds
from values import check_sum

WORLD = 3
LEAVER = 2


def be_a_rank(rank: int, store: str, other: bool, ended, answers) -> None:
    limit = seconds(PATIENCE)
    dist.init_process_group("ft", f"file://{store}", rank=rank, world_size=WORLD, timeout=limit)
    check_sum()
    if rank != LEAVER:
        answers.put((rank, seen_after_the_end_of_another(rank, ended)))
    elif other:
        multiprocessing.set_start_method("spawn", force=True)


def seen_after_the_end_of_another(rank: int, ended) -> str | None:
    if not ended.wait(PATIENCE):
        return "the other one did not end"
    time.sleep(0.5)  # a death is known by then
    tensor = torch.ones(3)
    error = failure_of(lambda: dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0))
    return None if error is None else error.text


def main(method: str, store: str, *how: str) -> None:
    context = multiprocessing.get_context(method)
    if "early" in how:
        import torchft_ext  # noqa: F401

        context.set_forkserver_preload(["torchft_ext"])
    ended, answers = context.Event(), context.Queue()
    processes = [
        context.Process(
            target=be_a_rank, args=(rank, store, "other" in how, ended, answers), daemon=True
        )
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    processes[LEAVER].join(PATIENCE)
    ended.set()
    print(json.dumps(dict(answers.get(timeout=PATIENCE) for _ in range(WORLD - 1))))
    for process in processes:
        process.join(PATIENCE)


if __name__ == "__main__":
    main(*sys.argv[1:])
