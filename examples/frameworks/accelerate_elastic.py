#!/usr/bin/env python3
"""Accelerate in an elastic job: a worker that dies costs one step.

python -m torchft_ext.elastic --port 29500 &
for i in 1 2 3; do python examples/frameworks/accelerate_elastic.py & done
kill -9 %3                                            # the others go on
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torchft_ext import elastic

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--address", default="127.0.0.1:29500/job1", help="host:port/name")
parser.add_argument("--size", type=int, default=3, help="how many workers found the job")
parser.add_argument("--steps", type=int, default=500)
arguments = parser.parse_args()

# Accelerate reads rank and world size when it begins: the first view has to be there.
job = elastic.join(arguments.address, size=arguments.size, min_size=1, wait=True)
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs = torch.randn(4096, 16)
targets = inputs @ torch.randn(16, 1)
# prepare() would make a DDP that begins with collectives, which members of a running job do not
# answer. The state comes in steps() anyway.
plain = accelerator.prepare_model(nn.Linear(16, 1), evaluation_mode=True)
model = DDP(plain, init_sync=False)
optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
sampler = elastic.BatchSampler(inputs, batch_size=32, seed=1)  # follows rank and size by itself
state = elastic.State(model, optimizer, sampler)

for step in elastic.steps(state, total=arguments.steps):
    with step:
        batch = sampler.indices()
        with accelerator.autocast():
            loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
        accelerator.backward(loss)
        step.commit(optimizer.step, optimizer.zero_grad)
    if step.committed and step.number % 100 == 0 and step.view.rank == 0:
        print(f"step {step.number}: loss {loss.item():.5f}, {step.view.size} workers", flush=True)
print(f"over with loss {loss.item():.5f}, {step.view.size} workers", flush=True)
