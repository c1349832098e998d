"""How equal a run that was disturbed is to one that was not."""

from __future__ import annotations

import os
import signal

import torch
from elastic_side import come, members, net
from ranks import World, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torchft_ext import elastic

TOTAL = 30
DIES_AT = 11
LAST_BITS = 1e-5  # relative: float has 6e-8, and 30 steps pass what they find on

world = members(3)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """Of the same samples on all who train."""
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(number))
    loss: torch.Tensor = (model(inputs) - inputs[:, :3]).square().mean()
    return loss


def train(dies: bool) -> list[float]:
    """The losses of the committed steps."""
    model = DDP(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in elastic.steps(elastic.State(model, optimizer), TOTAL):
        with step:
            loss = loss_of(model, step.number)
            loss.backward()
            if dies and step.number == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            step.commit(optimizer.step)
        if step.committed:
            losses.append(loss.item())
    return losses


def undisturbed() -> list[float]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for number in range(TOTAL):
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_of_a_run_with_a_death_are_equal_up_to_last_bits(ranks, world: World):
    world.run(come, ranks.address(), 3)
    calls = [world.start(rank, train, rank == 1) for rank in range(3)]
    first, second = values_of([calls[0], calls[2]])
    assert first == second
    expected = undisturbed()
    assert len(first) == TOTAL
    assert all(
        abs(found - alone) <= LAST_BITS * alone
        for found, alone in zip(first, expected, strict=True)
    )
