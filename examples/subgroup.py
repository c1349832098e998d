#!/usr/bin/env python3
"""The default group is gloo's; one subgroup is fault-tolerant, and goes on without a member.

python examples/subgroup.py
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

LIMIT = timedelta(seconds=30)


def main() -> None:
    dist.init_process_group("gloo", timeout=LIMIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="ft", timeout=LIMIT)
    backend = torchft_ext.backend(group)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)

    if rank == 1:
        time.sleep(1)  # the others are through their sum, and wait in the next one
        os._exit(1)
    try:
        dist.all_reduce(total, group=group)
    except torchft_ext.PeerLostError as error:
        assert error.cause.rank is not None
        rank_in_group = rank - (rank > error.cause.rank)
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}/subgroup/generation2"
        backend.configure(place, rank_in_group, size - 1)

    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    members = dist.get_process_group_ranks(group)
    print(f"rank {rank}: the sum is {total.item():g}, of ranks {members}", flush=True)
    backend.shutdown()
    os._exit(0)  # gloo's default group has lost a member: leaving it properly could wait for it


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(start.copies_of(__file__, 3))
