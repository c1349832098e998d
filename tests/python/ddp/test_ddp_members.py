"""DDP's gradients are the mean over all ranks, whatever each rank's DDP object did before."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from rankside import OPERATION_LIMIT, backend, kept, seconds
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from values import me

MANY = {"bucket_cap_mb": 0.002}
VARIANTS: dict[str, dict[str, object]] = {
    "one_bucket": {},
    "many_buckets": MANY,
    "static_graph": {"static_graph": True, **MANY},
    "unused": {"find_unused_parameters": True, **MANY},
    "views": {"gradient_as_bucket_view": True, **MANY},
}


class Net(nn.Module):
    """With a layer that is left out in every third step, where it may be."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.first, self.second = nn.Linear(6, 30), nn.Linear(30, 30)
        self.sometimes, self.last = nn.Linear(30, 30), nn.Linear(30, 3)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        if not self.skips or step % 3:
            x = x + self.sometimes(x)
        return self.last(x)


def wrap(name: str = "ddp", **options: object) -> None:
    torch.manual_seed(0)
    net = Net(skips="find_unused_parameters" in options)
    kept[name] = DistributedDataParallel(net, **options)


def wrap_once(name: str, **options: object) -> None:
    if name not in kept:
        wrap(name, **options)


def take_state(name: str = "ddp") -> None:
    """Take rank 0's parameters, as a newcomer does."""
    for parameter in kept[name].module.parameters():
        dist.broadcast(parameter.data, 0)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(4, 6, generator=generator), step).square().mean()


def mean_gradients(net: nn.Module, world: int, steps: list[int]) -> list[torch.Tensor | None]:
    alone = copy.deepcopy(net)
    alone.zero_grad()
    for step in steps:
        for rank in range(world):
            (loss_of(alone, rank, step) / world).backward()
    return [parameter.grad for parameter in alone.parameters()]


def train(name: str, first: int, steps: int, tolerance: float = 1e-5) -> None:
    for step in range(first, first + steps):
        check_step(kept[name], [step], tolerance)


def check_step(model: DistributedDataParallel, steps: list[int], tolerance: float) -> None:
    """One synchronised step of these micro-batches, all but the last without synchronisation."""
    rank, world = me()
    expected = mean_gradients(model.module, world, steps)
    model.zero_grad()
    for step in steps:
        with model.no_sync() if step != steps[-1] else nullcontext():
            loss_of(model, rank, step).backward()
    for parameter, gradient in zip(model.module.parameters(), expected, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter -= 0.1 * (0 if parameter.grad is None else parameter.grad)


def fingerprint(name: str) -> str:
    return str([parameter.sum().item() for parameter in kept[name].module.parameters()])


@pytest.mark.parametrize("before", (0, 1, 5))
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_the_mean_from_a_newcomers_first_step_on(ranks, variant, before):
    workers = ranks.borrow(3)
    options = VARIANTS[variant]
    pair, newcomer = ranks.generation(workers[:2]), ranks.generation(workers[2:])
    pair.run(wrap, **options)
    pair.run(train, "ddp", 0, before)
    newcomer.run(wrap, **options)
    everybody = ranks.generation(workers)
    everybody.run(take_state)
    everybody.run(train, "ddp", before, 4)


def test_gradients_stay_the_mean_when_a_newcomer_has_trained_alone(ranks):
    workers = ranks.borrow(3)
    pair, newcomer = ranks.generation(workers[:2]), ranks.generation(workers[2:])
    pair.run(wrap, **MANY)
    newcomer.run(wrap, **MANY)
    newcomer.run(train, "ddp", 0, 4)
    everybody = ranks.generation(workers)
    everybody.run(take_state)
    everybody.run(train, "ddp", 0, 3)


def test_two_models_follow_in_the_same_generations(ranks):
    workers = ranks.borrow(3)
    pair, newcomer = ranks.generation(workers[:2]), ranks.generation(workers[2:])
    for name in ("one", "two"):
        pair.run(wrap, name, **MANY)
        newcomer.run(wrap, name, **MANY)
    pair.run(train, "one", 0, 3)
    everybody = ranks.generation(workers)
    for name in ("one", "two"):
        everybody.run(take_state, name)
    for step in range(3):
        everybody.run(train, "one", step, 1)
        everybody.run(train, "two", step, 1)


def copy_and_wrap(copied: bool) -> None:
    wrap("original", **MANY)
    kept["ddp"] = copy.deepcopy(kept["original"]) if copied else kept["original"]


def test_a_deep_copied_model_follows_too(ranks):
    workers = ranks.borrow(3)
    ranks.generation(workers[:2]).run(copy_and_wrap, True)
    ranks.generation(workers[:2]).run(train, "ddp", 0, 3)
    ranks.generation(workers[2:]).run(copy_and_wrap, False)
    everybody = ranks.generation(workers)
    everybody.run(take_state)
    everybody.run(train, "ddp", 3, 3)


def accumulate(first: int) -> None:
    check_step(kept["ddp"], [first, first + 1, first + 2], 1e-5)


@pytest.mark.parametrize("variant", ("unused", "views"))
def test_accumulated_gradients_are_the_mean_with_a_newcomer(ranks, variant):
    workers = ranks.borrow(3)
    ranks.generation(workers[:2]).run(wrap, **VARIANTS[variant])
    ranks.generation(workers[:2]).run(accumulate, 0)
    ranks.generation(workers[2:]).run(wrap, **VARIANTS[variant])
    everybody = ranks.generation(workers)
    everybody.run(take_state)
    for first in (3, 6, 7):
        everybody.run(accumulate, first)


def begin_accumulating() -> None:
    """A pass without synchronisation in which `sometimes` is used."""
    model = kept["ddp"]
    model.zero_grad()
    with model.no_sync():
        loss_of(model, me()[0], 1).backward()


def end_accumulating() -> None:
    """A synchronised pass in which it is not: its gradient of before is to be averaged."""
    model = kept["ddp"]
    rank, world = me()
    loss_of(model, rank, 3).backward()
    expected = mean_gradients(model.module, world, [1, 3])
    for parameter, gradient in zip(model.module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_what_a_pass_without_synchronisation_used_is_known_in_the_next_generation(ranks):
    world = ranks.world(2)
    world.run(wrap, **VARIANTS["unused"])
    world.run(train, "ddp", 0, 1)
    world.run(begin_accumulating)
    world.next().run(end_accumulating)


# ---------------------------------------------------------------- a backward of an older generation


def keep_loss() -> None:
    model = kept["ddp"]
    model.zero_grad()
    kept["loss"] = loss_of(model, me()[0], 1)


def forward_again() -> None:
    loss_of(kept["ddp"], me()[0], 2)


def backward_kept() -> None:
    kept["loss"].backward()


def gradients() -> int:
    return sum(parameter.grad is not None for parameter in kept["ddp"].module.parameters())


@pytest.mark.parametrize("again", (False, True))
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_backward_whose_forward_ran_in_an_older_generation_raises(ranks, variant, again):
    world = ranks.world(2)
    world.run(wrap, **VARIANTS[variant])
    world.run(train, "ddp", 0, 2)
    world.run(keep_loss)
    world = world.next()
    if again:
        world.run(forward_again)
    for call in world.start_all(backward_kept):
        assert "forward() ran in generation" in call.error("CommAbortedError").text
    assert world.run(gradients) == [0, 0]
    world.next().run(train, "ddp", 2, 3)


class Passes(nn.Module):
    """Gives back what it was given, beside what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.layer(x)


def keep_graph_in_front() -> None:
    kept["passes"] = DistributedDataParallel(Passes())
    kept["front"] = torch.ones(3, requires_grad=True) * 2
    kept["passes"](kept["front"])[1].sum().backward(retain_graph=True)


def backward_of_front() -> None:
    kept["front"].sum().backward()


def test_what_a_model_was_given_may_be_differentiated_in_a_later_generation(ranks):
    world = ranks.world(2)
    world.run(keep_graph_in_front)
    world.next().run(backward_of_front)


# ---------------------------------------------------------------- buckets that lie differently


class Pair(nn.Module):
    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def forward(self) -> torch.Tensor:
        return sum(part.square().sum() for part in self.parts)


def wrap_pair(shapes: list[tuple[int, int]], hook: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = kept["pair"] = DistributedDataParallel(Pair(shapes))
    if hook == "python":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "builtin":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def backward_of_pair() -> None:
    kept["pair"]().backward()


@pytest.mark.parametrize("hook", ("none", "python", "builtin"))
def test_gradients_of_other_parameters_are_never_added(ranks, hook):
    workers = ranks.borrow(2)
    ranks.generation(workers[:1]).run(wrap_pair, [(2, 3), (3, 2)], hook)
    ranks.generation(workers[1:]).run(wrap_pair, [(3, 2), (2, 3)], hook)
    for call in ranks.generation(workers).start_all(backward_of_pair):
        # torch makes another error of one that a hook's callback raises.
        assert "other bucket layout" in call.error("MismatchError", "RuntimeError").text
    same = [(2, 3), (3, 2)]
    world = ranks.generation(workers)
    world.run(wrap_pair, same, hook)
    world.run(backward_of_pair)


class Mixed(nn.Module):
    def __init__(self, sparse_first: bool) -> None:
        super().__init__()
        table = nn.Embedding(5, 4, sparse=True)
        self.parts = nn.ModuleList([table, nn.Linear(4, 2, bias=False)])
        if not sparse_first:
            self.parts = nn.ModuleList([self.parts[1], table])

    def forward(self) -> torch.Tensor:
        table, dense = sorted(self.parts, key=lambda part: isinstance(part, nn.Linear))
        return dense(table(torch.tensor([1, 3]))).square().sum()


def wrap_mixed(sparse_first: bool) -> None:
    kept["mixed"] = DistributedDataParallel(Mixed(sparse_first))


def forward_of_mixed() -> None:
    kept["mixed"]()


def test_sparse_buckets_that_lie_differently_are_told_before_a_gradient_moves(ranks):
    workers = ranks.borrow(2)
    for worker, sparse_first in zip(workers, (True, False), strict=True):
        ranks.generation([worker]).run(wrap_mixed, sparse_first)
    for call in ranks.generation(workers).start_all(forward_of_mixed):
        assert "other bucket layout" in call.error("MismatchError").text


# ---------------------------------------------------------------- hooks


def wrap_with_power_sgd(seed: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    wrap()  # one bucket, whose futures nothing else of this rank overtakes
    state = power.PowerSGDState(None, start_powerSGD_iter=2, random_seed=seed)
    kept["ddp"].register_comm_hook(state, power.powerSGD_hook)
    kept["state"] = state


def train_blindly(steps: int) -> None:
    model = kept["ddp"]
    for step in range(steps):
        model.zero_grad()
        loss_of(model, me()[0], step).backward()
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter -= 0.1 * (0 if parameter.grad is None else parameter.grad)


def power_sgd_steps() -> int:
    return kept["state"].iter


def test_power_sgd_begins_anew_with_a_newcomer_and_keeps_weights_equal(ranks):
    workers = ranks.borrow(3)
    pair, newcomer = ranks.generation(workers[:2]), ranks.generation(workers[2:])
    pair.run(wrap_with_power_sgd, 7)
    pair.run(train_blindly, 5)
    newcomer.run(wrap_with_power_sgd, 7)
    everybody = ranks.generation(workers)
    everybody.run(take_state)
    everybody.run(train, "ddp", 0, 2)  # exact as long as nothing is compressed
    everybody.run(train_blindly, 3)
    assert everybody.run(power_sgd_steps) == [5, 5, 5]
    assert len(set(everybody.run(fingerprint, "ddp"))) == 1


# ---------------------------------------------------------------- models as they are used


def join_with_uneven_inputs() -> None:
    from torch.distributed.algorithms.join import Join

    with Join([kept["ddp"]]):
        for step in range(2 + me()[0]):
            loss_of(kept["ddp"], me()[0], step).backward()


def test_a_newcomer_trains_with_models_that_have_been_in_a_join(ranks):
    workers = ranks.borrow(3)
    pair, newcomer = ranks.generation(workers[:2]), ranks.generation(workers[2:])
    pair.run(wrap, **MANY)
    pair.run(join_with_uneven_inputs)
    newcomer.run(wrap, **MANY)
    everybody = ranks.generation(workers)
    everybody.run(take_state)
    everybody.run(train, "ddp", 0, 3)
    everybody.run(join_with_uneven_inputs)


def freeze_first_layer(frozen: bool) -> None:
    for parameter in kept["ddp"].module.first.parameters():
        parameter.requires_grad_(not frozen)


def test_parameters_that_are_frozen_now_do_not_keep_a_model_from_following(ranks):
    world = ranks.world(2)
    world.run(wrap, find_unused_parameters=True, **MANY)
    world.run(train, "ddp", 0, 2)
    world = world.next()
    world.run(freeze_first_layer, True)
    world.run(train_blindly, 1)
    world.run(freeze_first_layer, False)
    world.run(train, "ddp", 2, 2)


def evaluate() -> None:
    with torch.inference_mode():
        loss_of(kept["ddp"], 0, 1)


def test_an_evaluation_may_be_a_generations_first_forward(ranks):
    world = ranks.world(2)
    world.run(wrap, **MANY)
    world.run(train, "ddp", 0, 2)
    world = world.next()
    world.run(evaluate)
    world.run(train, "ddp", 2, 3)


def average_by_hand() -> None:
    """Of gradients that are views into buckets, after a pass without synchronisation."""
    model = kept["ddp"]
    model.zero_grad()
    with model.no_sync():
        loss_of(model, me()[0], 1).backward()
    if me()[0] == 0:  # views in one rank, tensors of their own in the other
        for parameter in model.module.parameters():
            parameter.grad = parameter.grad.clone()
    for parameter in model.module.parameters():
        dist.all_reduce(parameter.grad)


def test_gradients_may_be_averaged_by_hand_where_they_are_views_into_buckets(ranks):
    world = ranks.world(2)
    world.run(wrap, gradient_as_bucket_view=True, bucket_cap_mb=1e-6)
    world.run(train, "ddp", 0, 3)
    world.run(average_by_hand)


class BeginsAnew:
    def __init__(self) -> None:
        self.begun = 0

    def begin_generation(self) -> None:
        self.begun += 1


def wrap_with_own_state() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrap(**MANY)
    kept["state"] = BeginsAnew()
    kept["ddp"].register_comm_hook(
        kept["state"], lambda _state, bucket: default_hooks.allreduce_hook(None, bucket)
    )


def times_begun() -> int:
    return kept["state"].begun


def test_a_hooks_own_state_is_told_of_each_generation(ranks):
    world = ranks.world(2)
    world.run(wrap_with_own_state)
    world.run(train, "ddp", 0, 2)
    assert world.run(times_begun) == [1, 1]
    world = world.next()
    world.run(train, "ddp", 2, 2)
    assert world.run(times_begun) == [2, 2]


def wrap_with_zero() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrap()
    parameters = kept["ddp"].module.parameters()
    kept["zero"] = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)


def step_with_zero(step: int, limit_s: float = OPERATION_LIMIT) -> None:
    backend().set_timeout(seconds(limit_s))
    model = kept["ddp"]
    rank, world = me()
    expected = mean_gradients(model.module, world, [step])
    before = [parameter.detach().clone() for parameter in model.module.parameters()]
    model.zero_grad()
    loss_of(model, rank, step).backward()
    kept["zero"].step()
    for parameter, was, gradient in zip(model.module.parameters(), before, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), was - 0.1 * gradient)


@pytest.mark.parametrize("members", ([1, 0, 2], [0, 2], [1, 2]))
def test_zero_optimizer_refuses_a_step_for_which_it_is_not_partitioned(ranks, members):
    world = ranks.world(3)
    world.run(wrap_with_zero)
    world.run(step_with_zero, 0)
    world = world.next([0, 1, 2])
    world.run(step_with_zero, 1)
    world = world.next(members)
    outcomes = [call.outcome() for call in world.start_all(step_with_zero, 2, limit_s=2.0)]
    assert any("partitioned" in value.text for ok, value in outcomes if not ok)
    world = world.next()
    world.run(wrap_with_zero)
    world.run(step_with_zero, 3)


# ---------------------------------------------------------------- members that come and go


def members_of(seed: int) -> list[list[int]]:
    """Six generations of up to four processes; one of each generation's goes on to the next."""
    chooser = random.Random(seed)
    generations = [[0, 1]]
    while len(generations) < 6:
        stays = chooser.choice(generations[-1])
        others = [each for each in range(4) if each != stays]
        generations.append([stays, *chooser.sample(others, chooser.randrange(4))])
    return generations


@pytest.mark.parametrize("seed", range(20))
def test_weights_stay_equal_while_members_come_and_go(ranks, seed):
    workers = ranks.borrow(4)
    options = list(VARIANTS.values())[seed % len(VARIANTS)]
    name = f"seed {seed}"
    step = 0
    for members in members_of(seed):
        for each in members:  # who is here for the first time wraps its model alone
            ranks.generation([workers[each]]).run(wrap_once, name, **options)
        world = ranks.generation([workers[each] for each in members])
        world.run(take_state, name)
        world.run(train, name, step, 1 + seed % 3)
        step += 1 + seed % 3
        assert len(set(world.run(fingerprint, name))) == 1
