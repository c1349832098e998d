#!/usr/bin/env python3
"""Train with DDP on three processes; one is killed in mid-training; the others train on.

python examples/survive.py
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import furthest_state
import start
import torch
import torch.distributed as dist
from launcher_membership import Membership, await_newer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchft_ext

STEPS = 20
PATIENCE_S = 30.0


def main() -> None:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False)
    dist.init_process_group("ft", timeout=timedelta(seconds=30))
    me = rank = dist.get_rank()
    members = Membership.first(dist.get_world_size())
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(10, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    step, healthy = 0, True
    while step < STEPS:
        try:
            if not healthy:
                # Who is left: the launcher has written it down.
                members, rank = await_newer(store, members, rank, PATIENCE_S)
                place = f"{host}:{port}/{members.prefix}"
                torchft_ext.backend().configure(place, rank, members.world)
                # One survivor may have finished the step that failed on another.
                step = furthest_state.take_furthest(model.module, optimizer, step)
                healthy = True
            if me == 1 and step == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            inputs = torch.randn(16, 10)
            optimizer.zero_grad()
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            step += 1
        except torchft_ext.CommError as error:
            print(f"worker {me}, step {step}: {error}", flush=True)
            healthy = False

    furthest_state.compare(model.module, optimizer)  # raises where survivors' weights differ
    if dist.get_rank() == 0:
        print(f"{step} steps done; {dist.get_world_size()} members hold the same weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(start.copies_of(__file__, 3))
