"""One rank of Python's DistributedDataParallel, on the model and data of ddp_rank_main.cpp.

ddp_rank.py PORT RANK SIZE DIRECTORY VARIANT...: writes what each step computed
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

OPTIONS: dict[str, dict[str, bool]] = {
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
}


def pattern(count: int, shift: int, factor: int) -> torch.Tensor:
    """Make [count] small fractions."""
    return torch.arange(count).mul(factor).add(shift).remainder(19).sub(9).float().div(50)


class Net(nn.Module):
    """As DdpNet of ddp_net.h."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.first, self.second = nn.Linear(6, 30), nn.Linear(30, 30)
        self.sometimes = nn.Linear(30, 30)
        self.norm, self.last = nn.BatchNorm1d(30), nn.Linear(30, 3)
        with torch.no_grad():
            for shift, parameter in enumerate(self.parameters()):
                parameter.copy_(pattern(parameter.numel(), shift, 37).view_as(parameter))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Leave out one layer in every third step, where it may be."""
        y = torch.relu(self.second(torch.relu(self.first(x))))
        if not self.skips or step % 3:
            y = y + self.sometimes(y)
        return self.last(self.norm(y))


def backward(model: DistributedDataParallel, step: int, rank: int) -> None:
    """Run a synchronised step; every other one adds up two batches."""
    model.zero_grad()
    for each in [step + 100, step] if step % 2 else [step]:
        with model.no_sync() if each > step else nullcontext():
            x = pattern(8 * 6, 7 * each + 3 * rank, 13).mul(4).view(8, 6)
            model(x, each).square().mean().backward()


def train(variant: str, rank: int) -> bytes:
    """Train five steps. Returns what they computed."""
    caps = {} if variant == "one_bucket" else {"bucket_cap_mb": 2048 / 2**20}
    net = Net(variant == "unused")
    model = DistributedDataParallel(net, **caps, **OPTIONS.get(variant, {}))
    written = b""
    for step in range(5):
        backward(model, step, rank)
        gradients = [each.grad for each in net.parameters() if each.grad is not None]
        written += b"".join(each.numpy().tobytes() for each in [*gradients, *net.buffers()])
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= parameter.grad * 0.125
    return written


def main(port: str, rank: str, size: str, directory: str, *variants: str) -> None:
    """Train each variant."""
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
    dist.init_process_group("ft", store=store, rank=int(rank), world_size=int(size))
    for variant in variants:
        Path(directory, variant + rank).write_bytes(train(variant, int(rank)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
