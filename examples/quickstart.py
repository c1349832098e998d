#!/usr/bin/env python3
"""Three processes sum a tensor; one of them dies; the others go on in the same group.

python examples/quickstart.py
torchrun --nproc-per-node 3 examples/quickstart.py
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import start
import torch
import torch.distributed as dist

import torchft_ext


def main() -> None:
    dist.init_process_group("ft", timeout=timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {rank} of {size}: the sum is {total.item():g}", flush=True)

    if rank == 1:
        time.sleep(1)  # the others are through their sum, and wait in the next one
        os._exit(0)  # no goodbye; torchrun is content with status 0
    try:
        dist.all_reduce(total)
    except torchft_ext.PeerLostError as error:
        lost = error.cause
        print(f"rank {rank} of {size}: lost rank {lost.rank}: {lost.how}", flush=True)
        assert lost.rank is not None
        rank -= rank > lost.rank  # those above the dead move down
        size -= 1

    # The survivors name the same place and size, and a rank each.
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}/generation2"
    torchft_ext.backend().configure(place, rank, size)
    total = torch.ones(1)
    dist.all_reduce(total)
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {size}: the sum is {total.item():g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(start.copies_of(__file__, 3))
