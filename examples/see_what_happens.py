#!/usr/bin/env python3
"""Three signs of trouble, and the rank behind each: it is slow, it does not come, it dies.

python examples/see_what_happens.py
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import start
import torch
import torch.distributed as dist

import torchft_ext

LIMIT = timedelta(seconds=4)


def is_slow(rank: int) -> None:
    """Rank 2 comes to the second operation 2 s late; nothing fails."""
    dist.all_reduce(torch.ones(1))
    if rank == 2:
        time.sleep(2)
    dist.all_reduce(torch.ones(1))
    time.sleep(1.2)  # the end of a wait is counted within a second
    if rank == 0:
        print(f"waited for: {torchft_ext.backend().stats()['waited_for']}", flush=True)


def does_not_come(rank: int) -> None:
    """Rank 2 stays in its own code for longer than the others wait."""
    if rank == 2:
        time.sleep(LIMIT.total_seconds() + 2)
        return
    try:
        dist.all_reduce(torch.ones(1))
    except torchft_ext.CommTimeoutError as error:
        if rank == 0:
            print(error, flush=True)


def dies(rank: int) -> None:
    if rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except torchft_ext.PeerLostError as error:
        if rank == 0:
            print(error, flush=True)


def main() -> None:
    dist.init_process_group("ft", timeout=LIMIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    is_slow(rank)
    does_not_come(rank)
    store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    torchft_ext.backend().configure(f"{store}/again", rank, size, timeout=timedelta(seconds=30))
    dies(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(start.copies_of(__file__, 3))
