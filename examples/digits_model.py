"""The data and the network of the demonstration: scikit-learn's 8 x 8 handwritten digits."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

# Of all workers together. A multiple of every world size up to 6, so that equal shares exist.
GLOBAL_BATCH = 120
TEST_IMAGES = 360


class Digits:
    """1437 images to train on, 360 to test with. Every worker holds all of them."""

    def __init__(self, seed: int) -> None:
        raw = load_digits()
        order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(seed))
        images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1)[order]
        labels = torch.tensor(raw.target)[order]
        self.test = images[:TEST_IMAGES], labels[:TEST_IMAGES]
        self.train = images[TEST_IMAGES:], labels[TEST_IMAGES:]


class DigitsNet(nn.Module):
    """Two convolutions, two linear layers: 38 thousand parameters, and two buffers."""

    mean: Tensor
    scale: Tensor

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", images.mean())
        self.register_buffer("scale", images.std())
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = (images - self.mean) / self.scale
        x = functional.relu(self.first(x))
        x = functional.max_pool2d(functional.relu(self.second(x)), 2)
        x = functional.relu(self.hidden(x.flatten(1)))
        logits: Tensor = self.output(x)
        return logits


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images whose digit is recognised, 0 to 1."""
    right: Tensor = model(images).argmax(1) == labels
    return right.float().mean().item()
