"""What could not be sent to a newcomer is refused at the first commit after it appears, by path."""

from __future__ import annotations

import re
from collections import deque
from enum import Enum

import pytest
import torch
from fake_job import FakeJob, a_job, commit_all
from torch import nn

from torchft_ext.elastic import _refusal
from torchft_ext.elastic._sampler import BatchSampler
from torchft_ext.elastic._state import State
from torchft_ext.elastic._steps import steps

job = pytest.fixture(a_job)


@pytest.fixture(autouse=True)
def everything_is_cheap(monkeypatch):
    """Nothing is looked at less often, however slow this machine is."""
    monkeypatch.setattr(_refusal, "_CHEAP_S", float("inf"))


class Phase(Enum):
    DECAY = 1


class Extra(nn.Linear):
    """A module with a value of its own in its state."""

    extra: object = 0

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


class Average:
    """An object of a user's own."""

    def __init__(self) -> None:
        self.tree: object = {"decay": 0.9, "0.weight": torch.zeros(2)}
        self.asked = 0

    def state_dict(self) -> object:
        self.asked += 1
        return self.tree

    def load_state_dict(self, tree: object) -> None:
        self.tree = tree


@pytest.fixture
def state() -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), Extra(2, 1))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    scaler = torch.amp.GradScaler("cpu")
    return State(model, optimizer, scheduler, scaler, BatchSampler(9, 2), average=Average())


def at_step(state: State, job: FakeJob, number: int, change) -> list[int]:
    """Train, and call change() in one commit; return the numbers of the steps that began."""
    model, optimizer = state.objects["model"], state.objects["optimizer"]
    begun = []
    for step in steps(state, 6, job=job):
        with step:
            begun.append(step.number)
            model(torch.ones(3, 2)).sum().backward()
            step.commit(optimizer.step, change if step.number == number else lambda: None)
    return begun


def in_group(state: State, value: object) -> None:
    state.objects["optimizer"].param_groups[0]["lr"] = value


def in_state(state: State, value: object) -> None:
    last = list(state.objects["model"].parameters())[-1]
    state.objects["optimizer"].state[last]["phase"] = [0, value]


def in_scheduler(state: State, value: object) -> None:
    state.objects["scheduler"].base_lrs = [value]


def in_module(state: State, value: object) -> None:
    state.objects["model"][1].extra = {"phase": value}


def in_average(state: State, value: object) -> None:
    state.objects["average"].tree["1.weight"] = value


PLACES = [
    (in_group, "optimizer.param_groups[0]['lr']"),
    (in_state, "optimizer.state[3]['phase'][1]"),
    (in_scheduler, "scheduler.base_lrs[0]"),
    (in_module, "model.1.get_extra_state()['phase']"),
    (in_average, "average['1.weight']"),
]


@pytest.mark.parametrize(("put", "path"), PLACES)
@pytest.mark.parametrize("value", [Phase.DECAY, {1}, deque()], ids=repr)
def test_value_that_cannot_be_sent_is_refused_at_its_commit_by_path(state, job, put, path, value):
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    with pytest.raises(TypeError, match=f"^{re.escape(path)}: .*, found {re.escape(kind)}; "):
        at_step(state, job, 3, lambda: put(state, value))
    assert (state.step, state.dirty) == (4, False)  # that step counts
    assert job.events[-1].startswith("abort step 3: TypeError")
    with pytest.raises(TypeError):  # and again, while it is there
        state.check()


def test_value_that_comes_with_another_object_is_refused(state, job):
    commit_all(state, job, 1)
    state.put(model=Extra(1, 1))
    state.objects["model"].extra = Phase.DECAY
    with pytest.raises(TypeError, match=r"^model\.get_extra_state\(\): "):
        state.check()


def test_tensor_that_cannot_be_sent_is_refused(state, job):
    weight = state.objects["model"][0].weight

    def change() -> None:
        state.objects["optimizer"].state[weight]["sparse"] = torch.ones(2).to_sparse()

    with pytest.raises(TypeError, match=r"^optimizer\.state\[0\]\['sparse'\]: expected a dense"):
        at_step(state, job, 2, change)


def test_key_that_cannot_be_sent_is_refused(state, job):
    with pytest.raises(TypeError, match=r"^average: the key <Phase.DECAY: 1>: "):
        at_step(state, job, 2, lambda: state.objects["average"].tree.update({Phase.DECAY: 1}))


def test_optimizer_with_a_state_dict_of_its_own_is_asked_for_it(job):
    class Own(torch.optim.SGD):
        phase: object = 0

        def state_dict(self):
            return {**super().state_dict(), "phase": self.phase}

    model = nn.Linear(2, 1)
    optimizer = Own(model.parameters(), 0.1)
    with pytest.raises(TypeError, match=r"^optimizer\.phase: "):
        at_step(State(model, optimizer), job, 2, lambda: setattr(optimizer, "phase", {1}))


@pytest.mark.parametrize("put", [put for put, _ in PLACES])
def test_scalar_of_numpy_is_taken_everywhere(state, job, put):
    numpy = pytest.importorskip("numpy")
    value = numpy.float64(0.01)
    assert at_step(state, job, 3, lambda: put(state, value)) == list(range(6))


def test_nothing_is_refused_where_pickle_is_allowed(state, job):
    state.allow_pickle = True
    assert at_step(state, job, 3, lambda: in_state(state, {1})) == list(range(6))


def test_object_that_takes_long_takes_a_hundredth_of_the_time(state, monkeypatch):
    now = [10.0]
    monkeypatch.setattr(_refusal, "_CHEAP_S", 50e-6)
    monkeypatch.setattr(_refusal, "monotonic", lambda: now[0])
    average = state.objects["average"]
    quick = average.state_dict

    def slow() -> object:
        now[0] += 0.001
        return quick()

    monkeypatch.setattr(average, "state_dict", slow)
    for _ in range(1000):
        state.check()
        now[0] += 0.001
    assert 9 <= average.asked <= 11
