#!/usr/bin/env python3
"""Three processes sum a tensor; one of them dies; the others go on in the same group.

python examples/quickstart.py
torchrun --nproc-per-node 3 examples/quickstart.py
"""

from __future__ import annotations

import os
import sys
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
        os._exit(0)  # dies without a goodbye; torchrun takes status 0 for the end of its work
    try:
        dist.all_reduce(total)
    except torchft_ext.PeerLostError as error:
        print(f"rank {rank} of {size}: lost rank {error.cause.rank}: {error.cause.how}", flush=True)
        assert error.cause.rank is not None
        rank -= rank > error.cause.rank  # those above the dead move down
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
