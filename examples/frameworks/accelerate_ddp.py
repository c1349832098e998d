#!/usr/bin/env python3
"""Accelerate: make the group first; Accelerate takes the one that it finds.

python examples/start.py 2 examples/frameworks/accelerate_ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("ft")  # before the Accelerator, which on the CPU refuses the name "ft"
accelerator = Accelerator(cpu=True)
inputs = torch.randn(64, 10)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
plain = nn.Linear(10, 1)
model, optimizer, data = accelerator.prepare(
    plain, torch.optim.Adam(plain.parameters(), lr=0.01), loader
)
steps = 0
for batch, targets in data:
    optimizer.zero_grad()
    accelerator.backward((model(batch) - targets).square().mean())
    optimizer.step()
    steps += 1
print(f"rank {dist.get_rank()}: backend {dist.get_backend()}, {steps} steps")
dist.destroy_process_group()
