"""What survivors without agreement go on from: examples/furthest_state.py, alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
# In each, who has done how many steps. None at all: an optimizer without momentum yet.
STEPS = [(5, 6), (6, 5), (0, 3), (4, 6, 5), (6, 4, 6)]


def furthest_state():
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    import furthest_state

    return furthest_state


def small_model(seed: int) -> nn.Module:
    """With buffers of two dtypes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=chance)).square().sum().backward()
        optimizer.step()


def trained(steps: int, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after so many steps on data of the rank's own: each rank's state is another one."""
    model = small_model(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train(model, optimizer, steps, seed=100 + rank)
    return model, optimizer


def take_furthest(steps: tuple[int, ...]) -> dict:
    """Take the furthest state and make one more step, the same on all ranks."""
    state, mine = furthest_state(), steps[dist.get_rank()]
    model, optimizer = trained(mine, dist.get_rank())
    result = {"before": state.digest(model, optimizer)}
    result["steps"] = state.take_furthest(model, optimizer, mine)
    result["after"] = state.digest(model, optimizer)
    state.compare(model, optimizer)
    train(model, optimizer, 1, seed=7)
    result["a step later"] = state.digest(model, optimizer)
    return result


def compare_states(seeds: tuple[int, ...]) -> None:
    model = small_model(seeds[dist.get_rank()])
    furthest_state().compare(model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_all_ranks_take_the_state_of_one_that_has_done_most_steps(ranks, steps):
    results = ranks.world(len(steps)).run(take_furthest, steps)
    assert len({result["before"] for result in results}) == len(steps), "some were alike"
    furthest = results[steps.index(max(steps))]
    assert {result["after"] for result in results} == {furthest["before"]}
    assert {result["steps"] for result in results} == {max(steps)}


def test_ranks_that_have_taken_one_state_stay_alike_in_the_next_step(ranks):
    results = ranks.world(2).run(take_furthest, (5, 6))
    assert len({result["a step later"] for result in results}) == 1
    assert all(result["a step later"] != result["after"] for result in results)


def test_digest_changes_with_every_tensor_of_model_and_optimizer():
    state = furthest_state()
    model, optimizer = trained(steps=2, rank=0)
    tensors = [*model.state_dict().values(), *optimizer.state_dict()["state"].values()]
    tensors = [t if isinstance(t, torch.Tensor) else t["momentum_buffer"] for t in tensors]
    digests = {state.digest(model, optimizer)}
    for tensor in tensors:
        tensor.view(-1)[0] += 1
        digests.add(state.digest(model, optimizer))
    assert len(tensors) == 9 + 6 and len(digests) == 1 + len(tensors)


def test_states_that_differ_are_refused_on_every_rank(ranks):
    world = ranks.world(3)
    world.run(compare_states, (1, 1, 1))
    for call in world.start_all(compare_states, (1, 1, 2)):
        assert "the state differs between ranks" in call.error("RuntimeError").text
