"""Members that hold something else than the others find out in that step, and are told what."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import elastic_side
import numpy as np
import pytest
import torch
import torch.distributed as dist
from elastic_side import jobs, members, wait_for_newcomer
from ranks import World, values_of
from rankside import wait_until
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from torchft_ext import _C, elastic
from torchft_ext.elastic._divergence import _error_of, _note, _Report
from torchft_ext.elastic._evidence import Comparison, Evidence, Rows
from torchft_ext.elastic._goal import Goal

STEPS = 6

world = members(3)


def come(address: str, size: int) -> None:
    elastic_side.come(address, size)


# ---- what is compared, in one process


def a_state(rate: object = 0.1, batch_size: int = 2, seed: int = 0) -> elastic.State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    optimizer.param_groups[0]["lr"] = rate
    sampler = elastic.BatchSampler(20, batch_size, seed=seed)
    return elastic.State(model, optimizer, scheduler, sampler)


def with_gradients(state: elastic.State) -> elastic.State:
    state.objects["model"](torch.ones(4, 3)).square().sum().backward()
    return state


def evidence_of(state: elastic.State, check: str | None = "gradients", total: int = 9) -> Evidence:
    return Comparison(state, Goal(total), check, None).of_step()


def differs_in(one: Evidence, other: Evidence) -> str:
    """What the members are told; empty: their digests are equal."""
    if one.digest() == other.digest():
        return ""
    return told(one, other, 1 << 19)


def told(one: Evidence, other: Evidence, room: int) -> str:
    notes = [_note(each, room) for each in (one, other)]
    assert all(len(note) <= room for note in notes)
    reports = [_Report.unpack(note, one) for note in notes]
    return str(_error_of(dict(enumerate(reports)), a_state().objects))


def test_equal_states_have_equal_digests():
    assert not differs_in(
        evidence_of(with_gradients(a_state())), evidence_of(with_gradients(a_state()))
    )


def test_values_that_travelled_are_equal():
    """A newcomer gets floats for scalars of numpy, and groups whose keys are sorted."""
    one, other = with_gradients(a_state(np.float64(0.25))), with_gradients(a_state(0.25))
    group = other.objects["optimizer"].param_groups[0]
    taken = {key: group[key] for key in sorted(group)}
    group.clear()
    group.update(taken)
    assert not differs_in(evidence_of(one), evidence_of(other))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rate": 0.2}, r"optimizer\.param_groups\[0\]\['lr'\] differs: 0\.1 on .* scheduler"),
        (
            {"batch_size": 3},
            r"batchsampler\.batch_size differs: 2 on ranks \[0\]; 3 on",
        ),
        ({"seed": 1}, r"batchsampler\.seed differs"),
    ],
)
def test_plain_values_are_compared(change, named):
    one, other = with_gradients(a_state()), with_gradients(a_state(**change))
    assert_matches(differs_in(evidence_of(one), evidence_of(other)), named)


def assert_matches(text: str, pattern: str) -> None:
    with pytest.raises(RuntimeError, match=pattern):
        raise RuntimeError(text)


def test_total_and_step_are_compared():
    one, other = a_state(), a_state()
    assert_matches(differs_in(evidence_of(one), evidence_of(other, total=8)), "total differs: 9 on")
    other.step = 1
    assert_matches(differs_in(evidence_of(one), evidence_of(other)), "step 0: step differs")


def test_scheduler_is_compared():
    one, other = a_state(), a_state()
    other.objects["scheduler"].last_epoch += 1
    assert_matches(differs_in(evidence_of(one), evidence_of(other)), r"scheduler\.last_epoch")


def test_tensor_as_learning_rate_is_compared():
    one, other = a_state(torch.tensor(0.1)), a_state(torch.tensor(0.2))
    assert_matches(
        differs_in(evidence_of(one), evidence_of(other)), r"values of optimizer\.param_groups\[0\]"
    )


def set_nan(gradient: torch.Tensor, sign: float) -> None:
    gradient.fill_(math.copysign(math.nan, sign))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda g: g.fill_(1.0), lambda g: g.fill_(2.0)),
        (lambda g: g.fill_(0.0), lambda g: g.fill_(-0.0)),
        (lambda g: set_nan(g, 1.0), lambda g: set_nan(g, -1.0)),
    ],
)
def test_bits_of_gradients_are_compared(one, other):
    states = [with_gradients(a_state()) for _ in range(2)]
    for state, change in zip(states, (one, other), strict=True):
        change(state.objects["model"][1].weight.grad)
    found = differs_in(*(evidence_of(state) for state in states))
    assert_matches(found, r"gradient of model\.1\.weight differs.*wrapped in DDP")
    assert not differs_in(*(evidence_of(state, "state") for state in states))
    assert not differs_in(*(evidence_of(state, None) for state in states))


def test_missing_gradient_is_not_a_zero():
    one, other = with_gradients(a_state()), with_gradients(a_state())
    one.objects["model"][0].bias.grad.zero_()
    other.objects["model"][0].bias.grad = None
    assert_matches(
        differs_in(evidence_of(one), evidence_of(other)), r"gradient of model\.0\.bias differs"
    )


def test_parameters_are_compared_where_the_program_says_so():
    one, other = a_state(), a_state()
    with torch.no_grad():
        other.objects["model"][0].weight += 1
    assert not differs_in(evidence_of(one), evidence_of(other))
    assert_matches(
        differs_in(evidence_of(one, "state"), evidence_of(other, "state")),
        r"values of model\.0\.weight differs",
    )


def test_result_is_compared_whole_but_for_buffers():
    def result(change: Callable[[nn.Module], object]) -> Evidence:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200))
        change(model)
        return Comparison(elastic.State(model), Goal(1), "gradients", None).of_result()

    def change_one_element(model: nn.Module) -> None:
        with torch.no_grad():
            model[0].weight[77, 133] += 1

    same = result(lambda model: None)
    assert not differs_in(same, result(lambda model: model[1].running_mean.fill_(3.0)))
    assert_matches(differs_in(same, result(change_one_element)), r"model/0\.weight differs: hash")


def test_report_fits_into_the_room_that_there_is():
    one, other = with_gradients(a_state()), with_gradients(a_state())
    other.objects["model"][1].bias.grad += 1
    evidence = evidence_of(one), evidence_of(other)
    differs = r"gradient of model\.1\.bias.* differs.*wrapped in DDP"
    for room in (10_000, 1000, 600):  # with texts; hashes of all rows; of some together
        assert_matches(told(*evidence, room), differs)
    assert _note(evidence[0], 20) == b""
    for note in (b"", b"of another language"):
        assert _Report.unpack(note, evidence[0]) is None


def test_values_of_other_lengths_do_not_hide_what_differs():
    """Which rows there is room for is the same on all."""
    one, other = with_gradients(a_state()), with_gradients(a_state(0.123456789012345))
    evidence = evidence_of(one), evidence_of(other)
    for room in range(600, 12_000, 100):
        assert_matches(told(*evidence, room), r"param_groups\[0\]\['lr'\].* differs")


def test_other_parameters_are_told_where_there_is_little_room():
    one, other = a_state(), elastic.State(nn.Linear(3, 4))
    found = told(evidence_of(one), evidence_of(other), 1000)
    assert_matches(found, "the names of parameters and values differs")


def test_members_of_one_shard_are_compared_with_each_other():
    def evidence(shard: int, value: str) -> Evidence:
        rows = Rows({}, ["gradient of model.weight"], value.encode() * 8)
        return Evidence(Rows({"step": b"N"}), rows, shard)

    found = told(evidence(2, "a"), evidence(2, "b"), 1 << 19)
    assert_matches(found, r"gradient of model\.weight differs")
    assert_matches(told(evidence(0, "a"), evidence(1, "b"), 1 << 19), "nothing that ranks")


# ---- the bits of tensors


def bits(*tensors: torch.Tensor | None, seed: int = 1) -> list[bytes]:
    found = _C._sampled_bits(list(tensors), seed, False)
    return [found[at : at + 8] for at in range(0, len(found), 8)]


def test_layout_in_memory_does_not_count():
    tensor = torch.randn(6, 5, 4, 3)
    for other in (
        tensor.contiguous(memory_format=torch.channels_last),
        tensor.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([torch.zeros(1, 5, 4, 3), tensor])[1:],
    ):
        assert all(bits(tensor, seed=seed) == bits(other, seed=seed) for seed in range(20))


def test_dtype_and_shape_count():
    zeros = torch.zeros(6)
    kinds = [zeros, zeros.int(), zeros.view(2, 3), torch.zeros(7), torch.zeros(0), None]
    assert len({bits(kind)[0] for kind in kinds}) == len(kinds)


def test_every_element_is_looked_at_in_some_step():
    tensor, other = torch.zeros(100), torch.zeros(100)
    for index in (0, 50, 99):
        other.zero_()[index] = 1
        assert any(bits(tensor, seed=seed) != bits(other, seed=seed) for seed in range(2000))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.complex128])
def test_all_widths(dtype):
    assert bits(torch.ones(3, dtype=dtype)) != bits(torch.zeros(3, dtype=dtype))


def test_tensors_without_an_order_of_elements_have_a_hash():
    sparse = torch.eye(3).to_sparse()
    assert bits(sparse) == bits(torch.zeros(3, 3).to_sparse())
    assert bits(torch.ones(3, dtype=torch.complex64).conj()) == bits(
        torch.zeros(3, dtype=torch.complex64).conj()
    )


def test_tensors_without_memory_have_a_hash():
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(4)
    under_way = AsyncCollectiveTensor(torch.ones(4))
    assert len({bits(one)[0] for one in (freed, fake, under_way)}) == 1


def test_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match="expected tensors"):
        _C._sampled_bits([1], 0, False)


# ---- jobs of several members


def train(
    wrap: Callable[[nn.Module], nn.Module] = DDP, total: int = STEPS, batch_size: int = 4, **options
) -> str:
    """Return the digest of the state in the end."""
    torch.manual_seed(0)
    model = wrap(nn.Linear(6, 3))
    inputs = torch.randn(240, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = elastic.BatchSampler(240, batch_size, seed=1)
    state = elastic.State(model, optimizer, sampler)
    for step in elastic.steps(state, total, **options):
        with step:
            model(inputs[sampler.indices()]).square().mean().backward()
            step.commit(optimizer.step)
    return state.digest()


def same(model: nn.Module) -> nn.Module:
    return model


def how_it_ended(function: Callable[..., object], *args: object, **options: object) -> str:
    try:
        function(*args, **options)
    except elastic.DivergenceError as error:
        return f"{error} {error.path} {error.ranks}"
    return "no error"


def errors_of(world: World, *calls: tuple) -> set[str]:
    """What each member is told: the same, at the same time."""
    started = [world.start(rank, how_it_ended, *call) for rank, call in enumerate(calls)]
    return set(values_of(started))


def test_model_without_ddp_is_told_in_its_first_step(ranks, world):
    world.run(come, ranks.address(), 3)
    (text,) = errors_of(world, *[(train, same)] * 3)
    assert_matches(text, "^step 0: gradient of model.weight differs: .*wrapped in DDP")


def test_other_batch_size_is_told_in_its_first_step(ranks, world):
    world.run(come, ranks.address(), 3)
    (text,) = errors_of(world, (train,), (train, DDP, STEPS, 8), (train,))
    assert_matches(
        text,
        r"^step 0: batchsampler.batch_size differs: .*8 on ranks (\[\d\]).* "
        r"batchsampler\.batch_size \(\d,\)$",
    )


def test_other_total_is_told_in_its_first_step(ranks, world):
    world.run(come, ranks.address(), 3)
    (text,) = errors_of(world, (train,), (train,), (train, DDP, STEPS + 1))
    assert_matches(text, r"total differs: .*7 on ranks \[\d\].* total \(\d,\)$")
    assert_matches(text, r"6 on ranks \[\d, \d\]")


def test_members_that_are_told_to_compare_nothing_do_not(ranks, world):
    world.run(come, ranks.address(), 3)
    digests = world.run(train, same, check=None)
    assert len(set(digests)) == 3


def train_with_forgotten_scheduler(total: int) -> int:
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))
    state = elastic.State(model, optimizer)
    for step in elastic.steps(state, total):
        with step:
            model(torch.ones(2, 6)).sum().backward()
            step.commit(optimizer.step, scheduler.step)
        if step.number == 3 and step.view.size == 2:
            wait_for_newcomer()
    return state.step


def test_forgotten_scheduler_is_told_when_a_newcomer_has_made_a_step(ranks, world):
    address = ranks.address()
    first = World(ranks, world.workers[:2])
    first.run(come, address, 2)
    calls = [first.start(rank, how_it_ended, train_with_forgotten_scheduler, 50) for rank in (0, 1)]
    world.on(2, come, address, 2)
    late = world.start(2, how_it_ended, train_with_forgotten_scheduler, 50)
    (text,) = set(values_of([*calls, late]))
    assert_matches(text, r"\['lr'\] differs: .*Is a scheduler missing in State")


def train_and_spoil(number: int) -> None:
    """One member changes a parameter that no gradient depends on, when the last step is over."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 3))
    beside = torch.zeros(5)
    state = elastic.State(model, beside=beside)
    for step in elastic.steps(state, 3):
        with step:
            model(torch.ones(2, 6)).sum().backward()
            step.commit()
        if step.number == 2 and step.rank == number:
            beside[2] = 1.0


def test_result_is_compared_when_the_run_is_over(ranks, world):
    world.run(come, ranks.address(), 3)
    (text,) = errors_of(world, *[(train_and_spoil, 1)] * 3)
    assert_matches(text, r"^sync: beside/tensor: .*more than drift.* beside/tensor \(\d,\)$")


# ---- programs that are right


class Halves(nn.Module):
    """Ranks use different parameters, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(6, 3) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(inputs) if dist.get_rank() == 1 else self.first(inputs)


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_steps: int = 1,
    *,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    update: Callable[[], None] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    check: str = "gradients",
) -> str:
    further = [] if scaler is None else [scaler]
    if not isinstance(optimizer, ZeroRedundancyOptimizer):  # its state_dict() communicates
        further.insert(0, optimizer)
    state = elastic.State(model, *further)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in elastic.steps(state, STEPS, check=check):
        with step:
            for micro in range(micro_steps):
                last = micro == micro_steps - 1
                with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                    with context():
                        loss = model(torch.randn(4, 6, generator=draw)).square().mean()
                    if scaler is not None:  # overflows on one rank in one step
                        much = 1e38 if step.number == 2 and dist.get_rank() == 1 else 1.0
                        loss = scaler.scale(loss * much)
                    loss.backward()
            step.commit(update or optimizer.step)
    return " ".join(f"{one.sum().item():.6f}" for one in model.parameters())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def unused_parameters() -> str:
    model = DDP(Halves(), find_unused_parameters=True)
    return loop(model, sgd(model))


def accumulation() -> str:
    model = DDP(with_norm())
    return loop(model, sgd(model), 3)


def bf16() -> str:
    model = DDP(with_norm().bfloat16(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters())
    return loop(model, optimizer, context=lambda: torch.autocast("cpu", torch.bfloat16))


def amp_overflow() -> str:
    model = DDP(with_norm())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")

    def update() -> None:
        scaler.step(optimizer)
        scaler.update()

    ended = loop(model, optimizer, update=update, scaler=scaler)
    assert scaler.get_scale() < 2.0**16, "no overflow"
    return ended


def zero() -> str:
    jobs[0].recover()  # its parts are those of the view
    model = DDP(nn.Linear(6, 3))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return loop(model, optimizer)


def gradients_combined_in_commit() -> str:
    """Without DDP: the gradients of members differ until the update."""
    model = nn.Linear(6, 3)
    optimizer = sgd(model)

    def update() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()

    return loop(model, optimizer, update=update, check="state")


def local_sgd() -> str:
    """A step is a round: local updates, then the mean of all models."""
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def update() -> None:
        optimizer.step()
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()

    return loop(model, optimizer, 2, update=update, check="state")


PROGRAMS = {
    one.__name__: one
    for one in (
        unused_parameters,
        accumulation,
        bf16,
        amp_overflow,
        zero,
        gradients_combined_in_commit,
        local_sgd,
    )
}


def run_program(name: str) -> str:
    torch.manual_seed(0)
    return PROGRAMS[name]()


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_false_alarm(ranks, world, name):
    world.run(come, ranks.address(), 3)
    assert len(set(world.run(run_program, name))) == 1


def test_a_member_that_dies_meanwhile_is_no_difference(ranks, world):
    """The others go on, and are alike."""
    world.run(come, ranks.address(), 3)
    calls = world.start_all(train_slowly, 40)
    for rank in range(3):
        world.side(rank, wait_for_step, 5)
    world.kill(1)
    assert len(set(values_of([calls[0], calls[2]]))) == 1


numbers: list[int] = []


def train_slowly(total: int) -> str:
    numbers.clear()
    model = DDP(nn.Linear(6, 3))
    optimizer = sgd(model)
    state = elastic.State(model, optimizer)
    for step in elastic.steps(state, total):
        with step:
            model(torch.ones(2, 6)).sum().backward()
            step.commit(optimizer.step)
        numbers.append(step.number)
    assert jobs[0].view().size == 2
    return state.digest()


def wait_for_step(number: int) -> None:
    wait_until(lambda: number in numbers, f"step {number}")
