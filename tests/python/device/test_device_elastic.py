"""Elastic jobs whose model and gradients lie on devices: who dies or comes stops nobody else."""

from __future__ import annotations

import device_side
import elastic_side
import pytest
import test_elastic_job
import torch
import torch.distributed as dist
from device_side import accelerator, device, no_violation
from elastic_side import jobs
from ranks import World, values_of
from rankside import wait_until
from test_elastic_job import BATCH, SAMPLES, committed, steps_done, wait_for_steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torchft_ext import elastic


def come(address: str, size: int, place: int) -> None:
    accelerator.prepare()
    if accelerator.simulated():
        accelerator.simulator().reset()
    device_side.leave()
    torch.accelerator.set_device_index(place % torch.accelerator.device_count())
    test_elastic_job.come(address, size)


def close() -> None:
    device_side.leave()
    elastic_side.close()


def train(steps: int, founders: int = 0) -> tuple[int, str]:
    """Train up to that many steps; return how many were committed, and the state's digest.

    At step 10 as many founders, if any, wait for a newcomer.
    """
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 6)
    model = DDP(nn.Linear(6, 3).to(device()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = elastic.BatchSampler(SAMPLES, BATCH, seed=1)
    state = elastic.State(model, optimizer, sampler)
    for step in elastic.steps(state, total=steps):
        if step.number == 10 and step.view.size == founders:
            wait_until(lambda: bool(jobs[0].waiting()), "a newcomer")
        with step:
            batch = sampler.indices()
            model(inputs[batch].to(device())).square().mean().backward()
            gradient = next(model.parameters()).grad
            assert gradient.device == device()
            step.commit(optimizer.step)
        if step.committed:
            committed.append((step.number, step.view.size, list(batch)))
    assert all(torch.isfinite(parameter.cpu()).all() for parameter in model.parameters())
    return state.step, str(state.digest())


def sizes_of_committed() -> set[int]:
    return {size for _, size, _ in committed}


def sum_over_members() -> float:
    tensor = torch.ones(1, device=device())
    dist.all_reduce(tensor)
    jobs[0].check()
    return tensor.item()


@pytest.fixture
def world(devices):
    made = World(devices.pool, devices.pool.borrow(3))
    yield made
    made.run_at_the_end(close)


def test_death_costs_one_step_on_devices(devices, world):
    address = devices.pool.address()
    values_of([world.start(rank, come, address, 3, rank) for rank in range(3)])
    calls = world.start_all(train, 60)
    for rank in range(3):
        world.side(rank, wait_for_steps, 10)
    world.kill(0)
    results = [calls[rank].value() for rank in (1, 2)]
    assert results[0] == results[1], "the members hold different state"
    assert results[0][0] == 60
    for rank in (1, 2):
        assert world.on(rank, steps_done) == 60
        assert world.on(rank, sizes_of_committed) == {3, 2}
    sums = values_of([world.start(rank, sum_over_members) for rank in (1, 2)])
    assert sums == [2.0, 2.0]


def test_newcomer_gets_state_on_devices(devices, world):
    address = devices.pool.address()
    founders = World(devices.pool, world.workers[:2])
    values_of([founders.start(rank, come, address, 2, rank) for rank in range(2)])
    calls = founders.start_all(train, 40, 2)
    founders.side(0, wait_for_steps, 5)
    world.on(2, come, address, 2, 2)
    late = world.start(2, train, 40)
    results = values_of([*calls, late])
    assert results[0] == results[1] == results[2]
    assert founders.on(0, sizes_of_committed) == {2, 3}
    world.run(no_violation)
