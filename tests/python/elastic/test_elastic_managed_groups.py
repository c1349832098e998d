"""Groups that an elastic job manages: made by a rule in each view, or lasting over all of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from elastic_side import come, jobs, members, recover, wait_for_newcomer
from ranks import World, values_of
from rankside import failure_of, kept
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchft_ext
from torchft_ext import elastic

world = members(5)


def pairs(view: elastic.View) -> list[int]:
    """Two neighbours, the higher rank first."""
    first = view.rank // 2 * 2
    return [rank for rank in (first + 1, first) if rank < view.size]


def manage_pairs() -> None:
    jobs[0].manage("pairs", rule=pairs)


def sum_of_pair() -> tuple[int, float, int]:
    """After recover(): the rank in the view, what the pair's ranks add up to, rank in the pair."""
    rank = recover()
    group = jobs[0].managed_group("pairs")
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    return rank, tensor.item(), group.rank()


def test_groups_of_a_rule_are_made_in_each_view(ranks, world):
    address = ranks.address()
    founders = World(ranks, world.workers[:4])
    founders.run(come, address, 4)
    founders.run(manage_pairs)
    found = founders.run(sum_of_pair)
    assert sorted(found) == [(0, 1.0, 1), (1, 1.0, 0), (2, 5.0, 1), (3, 5.0, 0)]
    lost = [rank for rank, _, _ in found].index(1)
    founders.kill(lost)
    rest = World(ranks, [worker for worker in founders.workers if worker.alive()])
    assert sorted(rest.run(sum_of_pair)) == [(0, 1.0, 1), (1, 1.0, 0), (2, 2.0, 0)]
    world.on(4, come, address, 4)
    world.on(4, manage_pairs)
    late = world.start(4, sum_of_pair)
    rest.side(0, wait_for_newcomer)
    found = values_of([*rest.start_all(sum_of_pair), late])
    assert sorted(found) == [(0, 1.0, 1), (1, 1.0, 0), (2, 5.0, 1), (3, 5.0, 0)]


def test_group_of_a_rule_advises_to_take_its_successor(ranks, world):
    founders = World(ranks, world.workers[:2])
    founders.run(come, ranks.address(), 2)
    founders.run(manage_pairs)
    founders.run(recover)
    for texts in founders.run(advice_of_a_pair):
        for text in texts:
            assert text.endswith("take the group that it makes from job.managed_group()"), text


def advice_of_a_pair() -> list[str]:
    """Of the group in its view, and in the next one."""
    group = jobs[0].managed_group("pairs")
    torchft_ext.backend(group).abort("the test says so")
    texts = [failure_of(lambda: dist.all_reduce(torch.ones(1), group=group)).text]
    recover()
    texts.append(failure_of(lambda: group.allreduce([torch.ones(1)]).wait()).text)
    dist.all_reduce(torch.ones(1), group=jobs[0].managed_group("pairs"))
    return texts


def fail_in_each_view(view: elastic.View) -> list[int]:
    raise torchft_ext.MismatchError(f"the rule fails in view {view.number}")


def manage_what_fails() -> None:
    jobs[0].manage("pairs", rule=fail_in_each_view)


def why_no_progress() -> str:
    with pytest.raises(elastic.NoProgressError) as caught:
        recover()
    jobs[0].close()  # as programs do; the other one goes on alone, to the same end
    return str(caught.value)


def test_groups_that_fail_in_each_view_end_in_an_error_with_the_cause(ranks, world):
    founders = World(ranks, world.workers[:2])
    founders.run(come, ranks.address(), 2)
    founders.run(manage_what_fails)
    texts = founders.run(why_no_progress)
    assert any("in 3 views in a row of the same 2 members" in text for text in texts), texts
    assert all("the rule fails in view" in text for text in texts), texts


# A lasting group of some members: the DDP over it is made once.


def whole_pairs(view: elastic.View) -> list[int]:
    """Two neighbours, the higher rank first; a last one alone is in no group."""
    ranks = pairs(view)
    return ranks if len(ranks) == 2 else []


def manage_a_lasting_group() -> None:
    group = dist.new_group([0])
    jobs[0].manage("pairs", group, whole_pairs)
    model = nn.Linear(1, 1, bias=False)
    kept["lasting"] = group, DistributedDataParallel(model, process_group=group)


def mean_of_pair() -> tuple[int, object]:
    """After recover(): the rank in the view, and a gradient of the pair or why there is none."""
    rank = recover()
    group, model = kept["lasting"]
    now = jobs[0].managed_group("pairs")
    if now is None:
        return rank, failure_of(lambda: dist.all_reduce(torch.ones(1), group=group)).text
    assert now is group and dist.get_process_group_ranks(group) == whole_pairs(jobs[0].view())
    model.zero_grad()
    model(torch.tensor([float(rank)])).backward()
    word = torch.tensor([rank])
    dist.broadcast(word, src=rank // 2 * 2, group=group)
    return rank, (model.module.weight.grad.item(), word.item())


def test_lasting_group_of_some_members_follows_the_views(ranks, world):
    address = ranks.address()
    founders = World(ranks, world.workers[:3])
    founders.run(come, address, 3)
    founders.run(manage_a_lasting_group)
    found = sorted(founders.run(mean_of_pair))
    assert found[:2] == [(0, (0.5, 0)), (1, (0.5, 0))]
    assert "this member is in no group 'pairs' in view 1" in found[2][1]
    world.on(3, come, address, 3)
    world.on(3, manage_a_lasting_group)
    late = world.start(3, mean_of_pair)
    founders.side(0, wait_for_newcomer)
    found = values_of([*founders.start_all(mean_of_pair), late])
    assert sorted(found) == [(0, (0.5, 0)), (1, (0.5, 0)), (2, (2.5, 2)), (3, (2.5, 2))]
    founders.kill([rank for rank, _ in found].index(1))
    rest = World(ranks, [worker for worker in world.workers[:4] if worker.alive()])
    found = sorted(rest.run(mean_of_pair))
    assert found[:2] == [(0, (0.5, 0)), (1, (0.5, 0))]
    assert "the view is over" in found[2][1]  # its last group's own end stays


def test_manage_wants_a_group_or_a_rule(ranks, world):
    alone = World(ranks, world.workers[:1])
    alone.run(come, ranks.address(), 1)
    assert alone.on(0, refused_by_manage) == [
        "ValueError",
        "ValueError",
        "RuntimeError",
        "KeyError",
    ]


def refused_by_manage() -> list[str]:
    job = jobs[0]
    calls = [
        lambda: job.manage("none"),
        lambda: job.manage("all", job.group, pairs),
        lambda: job.manage("default", rule=pairs),
        lambda: job.managed_group("default"),
    ]
    return [failure_of(call).type for call in calls]
