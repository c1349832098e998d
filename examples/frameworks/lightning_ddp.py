#!/usr/bin/env python3
"""Lightning: DDPStrategy takes the backend's name.

python examples/start.py 2 examples/frameworks/lightning_ddp.py
"""

from __future__ import annotations

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return (self.layer(inputs) - targets).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


inputs = torch.randn(64, 10)
data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
trainer = L.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend="ft"),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Model(), data)
print(f"rank {dist.get_rank()}: backend {dist.get_backend()}, {trainer.global_step} steps")
dist.destroy_process_group()
