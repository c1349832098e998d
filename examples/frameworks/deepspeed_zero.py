#!/usr/bin/env python3
"""DeepSpeed: init_distributed() takes the backend's name.

DS_ACCELERATOR=cpu python examples/start.py 2 examples/frameworks/deepspeed_zero.py
"""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

deepspeed.init_distributed(dist_backend="ft")
model = nn.Linear(10, 1)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
    config={
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)
for _ in range(8):
    inputs = torch.randn(16, 10)
    loss = (engine(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
print(f"rank {dist.get_rank()}: backend {dist.get_backend()}, {engine.global_steps} steps")
dist.destroy_process_group()
