#!/usr/bin/env python3
"""Transformers' Trainer: make the group first; the Trainer takes the one that it finds.

python examples/start.py 2 examples/frameworks/hf_trainer.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Sums(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs = torch.randn(10, generator=torch.Generator().manual_seed(index))
        return {"inputs": inputs, "labels": inputs.sum().reshape(1)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layer(inputs)
        return {"loss": (outputs - labels).square().mean(), "outputs": outputs}


dist.init_process_group("ft")  # before TrainingArguments, which on the CPU refuse the name "ft"
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, num_train_epochs=1, report_to=[], save_strategy="no"
    )
    result = Trainer(model=Model(), args=arguments, train_dataset=Sums()).train()
print(f"rank {dist.get_rank()}: backend {dist.get_backend()}, {result.global_step} steps")
dist.destroy_process_group()
