"""Two processes train with DDP; a third one joins them in the middle.

    python examples/newcomer.py

Each member wraps its model in a group of its own, of one process. Then all of them, old and new,
call configure() with the same address; the newcomer takes the state from rank 0; and the next step
is one of three. Who has joined, and when, is agreed on by a plan here, and by your launcher in
earnest.
"""

from __future__ import annotations

import multiprocessing
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchft_ext

# What the plan says: before which step a generation begins, and of which processes.
PLAN = {0: [0, 1], 10: [0, 1, 2]}
STEPS = 20


def take_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Have what rank 0 has: parameters, buffers, and the optimizer's state."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    held = [optimizer.state_dict()]
    dist.broadcast_object_list(held, 0)
    optimizer.load_state_dict(held[0])


def train(process: int, port: int) -> None:
    torch.manual_seed(process)  # the newcomer's first parameters are others
    dist.init_process_group(
        "ft", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    model = DistributedDataParallel(nn.Linear(10, 1))  # in a group of one: nobody else is needed
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    group = torchft_ext.backend()
    for step in range(min(first for first, who in PLAN.items() if process in who), STEPS):
        if step in PLAN:
            members = PLAN[step]
            group.configure(f"127.0.0.1:{port}/step{step}", members.index(process), len(members))
            take_state(model.module, optimizer)  # a collective: old members call it too
        inputs = torch.randn(16, 10)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()  # on the mean of all members' gradients
    sums = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, model.module.weight.detach().sum().reshape(1))
    if dist.get_rank() == 0:
        print(f"{len(sums)} members, sums of weights {[each.item() for each in sums]}")
    assert all(torch.equal(each, sums[0]) for each in sums)
    dist.destroy_process_group()


def main() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=train, args=(each, store.port)) for each in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
