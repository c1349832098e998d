"""elastic.join(wait=True) returns with the first view, or says whom it waited for."""

from __future__ import annotations

import re
import time

import torch
import torch.distributed as dist
from elastic_side import come, jobs, members, wait_for_newcomer
from ranks import World, values_of
from rankside import PATIENCE, failure_of, seconds
from torch.nn.parallel import DistributedDataParallel as DDP

from torchft_ext import elastic

world = members(3)


def come_and_wait(address: str, size: int) -> tuple[int, int, bool]:
    come(address, size, wait=True)
    return dist.get_rank(), dist.get_world_size(), jobs[0].view() is not None


def train(steps: int) -> tuple[int, str]:
    """With a sampler of torch's, which asks for rank and size when it is made."""
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(2, 1), init_sync=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = elastic.State(model, optimizer)
    for step in elastic.steps(state, total=steps):
        with step:
            time.sleep(0.005)
            model(torch.ones(1, 2)).sum().backward()
            step.commit(optimizer.step)
    return state.step, state.digest()


def failed_wait(address: str) -> tuple[str, str, float]:
    began = time.monotonic()
    error = failure_of(lambda: come(address, 2, wait=True, timeout=seconds(6)))
    assert not dist.is_initialized()
    return error.type, error.text, time.monotonic() - began


def test_rank_and_world_size_are_the_jobs_from_the_beginning(ranks, world):
    address = ranks.address()
    founders = World(ranks, world.workers[:2])
    found = founders.run(come_and_wait, address, 2)
    assert sorted(found) == [(0, 2, True), (1, 2, True)]
    calls = founders.start_all(train, 200)
    assert world.on(2, come_and_wait, address, 2) == (2, 3, True)
    results = values_of([*calls, world.start(2, train, 200)])
    assert results == [results[0]] * 3 and results[0][0] == 200


def test_founder_that_does_not_come_to_the_first_view_is_named(ranks, world):
    address = ranks.address()
    other = world.start(0, come, address, 2)
    kind, text, elapsed = world.on(1, failed_wait, address)
    other.value()
    assert kind == "ElasticError" and elapsed < PATIENCE / 2
    assert re.search(r"within 0:00:06: rank [01] did not come\. Founders form it", text)
    world.on(1, come, ranks.address(), 1)  # nothing of the job is left


def test_newcomer_that_nobody_takes_in_is_told_so(ranks, world):
    address = ranks.address()
    world.on(0, come, address, 1)
    waiting = world.start(1, failed_wait, address)
    world.side(0, wait_for_newcomer)
    kind, text, elapsed = waiting.value()
    assert kind == "ElasticError" and elapsed < PATIENCE / 2
    assert "no view newer than 0 by the deadline" in text and "a newcomer is taken in" in text
