"""Validation and checkpoints of an elastic job: a death in them, and another job that goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from elastic_side import close, come, gradient, members, net
from ranks import World, values_of
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from torchft_ext import elastic

SHARDS = 2
SAVED = 8  # the step at which each job saves its state
TOTAL = 12

world = members(4)


def differences(parameters: dict[str, torch.Tensor], steps: int) -> list[str]:
    """Parameters that are not what one process gets that trains alone, without a checkpoint."""
    alone = net()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    for number in range(steps):
        optimizer.zero_grad()
        gradient(alone, number)
        optimizer.step()
    expected = dict(alone.named_parameters())
    return [
        name
        for name, value in parameters.items()
        if not torch.allclose(value, expected[name.removeprefix("module.")], atol=1e-4)
    ]


def load(state: elastic.State, path: str) -> None:
    saved = state.state_dict(to_load=True)
    dcp.load(saved, checkpoint_id=path, no_dist=True)
    state.load_state_dict(saved)


# Replicated


Result = tuple[int, int, list[str], list[int]]  # first and last step, what differs, failed steps


def train(
    total: int, *, folder: str = "", begin: str = "", dies_at: tuple[str, int] = ("", -1)
) -> Result:
    """Train; validate after each fourth commit, and save at one step, before its commit."""
    model = DDP(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = elastic.State(model, optimizer)
    if begin:
        load(state, begin)
    first, failed = state.step, []
    for step in elastic.steps(state, total):
        with step:
            gradient(model, step.number)
            if folder and step.number == SAVED:
                die_if(dies_at == ("save", step.number))
                dcp.save(state.state_dict(), checkpoint_id=f"{folder}/{step.view.number}")
            step.commit(optimizer.step)
            if step.number % 4 == 3:
                model.eval()
                die_if(dies_at == ("validation", step.number))
                dist.all_reduce(torch.ones(1))
                model.train()
        assert model.training
        if step.failure is not None:
            failed.append(step.number)
    return first, state.step, differences(dict(model.named_parameters()), state.step), failed


def die_if(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("dies_at", [("validation", 3), ("save", SAVED), ("validation", TOTAL - 1)])
def test_death_in_validation_or_saving_costs_no_step(ranks, world, tmp_path, dies_at):
    three = World(ranks, world.workers[:3])
    three.run(come, ranks.address(), 3)
    dying = {"dies_at": dies_at}
    calls = [
        three.start(rank, train, TOTAL, folder=str(tmp_path), **(dying if rank == 0 else {}))
        for rank in range(3)
    ]
    assert values_of(calls[1:]) == [(0, TOTAL, [], [dies_at[1]])] * 2
    saved = sorted(path.parent.name for path in tmp_path.glob("*/.metadata"))
    assert saved == ["1" if dies_at[1] > SAVED else "2"]


def test_another_job_of_another_size_goes_on_from_a_checkpoint(ranks, world, tmp_path):
    world.run(come, ranks.address(), 4)
    results = world.run(train, SAVED + 1, folder=str(tmp_path))
    assert results == [(0, SAVED + 1, [], [])] * 4
    world.run(close)
    rest = World(ranks, world.workers[:2])
    rest.run(come, ranks.address(), 2)
    assert rest.run(train, TOTAL, begin=str(tmp_path / "1")) == [(SAVED, TOTAL, [], [])] * 2


# Sharded


class Training:
    """A sharded model, which goes on from a checkpoint if there is one."""

    def __init__(self, begin: str) -> None:
        self.replicas = elastic.Replicas(SHARDS)
        self.state = elastic.State(elastic.BatchSampler(100, 2))
        self._begin = begin
        if begin:
            load(self.state, begin)  # the step: also of members that are parked at first

    def build(self, view: elastic.View) -> dict[str, object]:
        self.model = net()
        fully_shard(self.model, mesh=self.replicas.mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        made = {"model": self.model, "optimizer": self.optimizer}
        if self._begin:  # only once: the state goes on from what the objects before held
            load(elastic.State(**made), self._begin)
            self._begin = ""
        return made


def train_sharded(total: int, folder: str, begin: str = "") -> tuple[int, bool, list[str]]:
    """Steps, whether this member was parked, and what differs."""
    training = Training(begin)
    state, replicas = training.state, training.replicas
    for step in elastic.steps(state, total, build=training.build, replicas=replicas):
        with step:
            gradient(training.model, step.number)
            if step.number == SAVED:
                path = f"{folder}/{state.lineage.hex()}-{step.number}"
                dcp.save(state.state_dict(), checkpoint_id=path, process_group=replicas.group)
            step.commit(training.optimizer.step)
    if replicas.place is None:
        return state.step, True, []
    return state.step, False, differences(wholes_of(training.model), state.step)


def wholes_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def test_shards_go_on_from_a_checkpoint_with_fewer_replicas_and_a_parked_member(
    ranks, world, tmp_path
):
    world.run(come, ranks.address(), 4)
    folder = str(tmp_path)
    assert world.run(train_sharded, SAVED + 1, folder) == [(SAVED + 1, False, [])] * 4
    world.run(close)
    (path,) = (str(found.parent) for found in Path(folder).glob("*/.metadata"))
    rest = World(ranks, world.workers[:3])
    rest.run(come, ranks.address(), 3)
    results = sorted(rest.run(train_sharded, TOTAL, folder, path))
    assert results == [(TOTAL, False, []), (TOTAL, False, []), (TOTAL, True, [])]


# A step that is tried twice


def save(path: Path, value: float) -> None:
    """In two files, as two members would."""
    tensors = {name: torch.full((1000,), value) for name in ("first", "second")}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path, thread_count=2), no_dist=True)


def tear(path: Path, value: float, scratch: Path) -> None:
    """Another try, which ends when one of its files is written."""
    save(scratch, value)
    path.mkdir(exist_ok=True)
    file = min(scratch.glob("*.distcp"))
    (path / file.name).write_bytes(file.read_bytes())


def loaded(path: Path) -> set[float]:
    tensors = {name: torch.zeros(1000) for name in ("first", "second")}
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return {value for tensor in tensors.values() for value in tensor.tolist()}


def newest(folder: Path) -> Path | None:
    """As in docs/reference/elastic.md."""
    whole = [path for path in folder.iterdir() if (path / ".metadata").exists()]
    return max(whole, key=lambda path: path.name.split("-")[1:], default=None)


def test_two_tries_in_one_folder_may_leave_a_mixture_that_loads(tmp_path):
    path = tmp_path / "lineage-00000100"
    save(path, 1.0)
    tear(path, 2.0, tmp_path / "scratch")
    assert loaded(path) == {1.0, 2.0}


def test_tries_in_folders_of_their_own_leave_one_that_is_whole(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder / "lineage-00000090-0012", 0.0)
    save(folder / "lineage-00000100-0009", 1.0)
    tear(folder / "lineage-00000100-0010", 2.0, tmp_path / "scratch")
    found = newest(folder)
    assert found is not None and found.name == "lineage-00000100-0009"
    assert loaded(found) == {1.0}
