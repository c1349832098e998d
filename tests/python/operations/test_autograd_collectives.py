"""Collectives that autograd runs backward refuse to in a later generation than their forward's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as autograd_collectives
from rankside import leave_default_group

import torchft_ext
from torchft_ext import CommAbortedError

COLLECTIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": lambda one: autograd_collectives.all_reduce(one),
    "all_reduce in a group": lambda one: autograd_collectives.all_reduce(
        one, group=dist.group.WORLD
    ),
    "all_gather": lambda one: autograd_collectives.all_gather(one),
    "broadcast": lambda one: autograd_collectives.broadcast(one, 0),
    "reduce": lambda one: autograd_collectives.reduce(one, 0),
    "reduce_scatter": lambda one: autograd_collectives.reduce_scatter(torch.empty(2), [one]),
    "all_to_all": lambda one: autograd_collectives.all_to_all([torch.empty(2)], [one]),
    "copied name": lambda one: dist.nn.all_reduce(one),
    "functional all_gather": lambda one: functional.all_gather_tensor_autograd(
        one, 0, dist.group.WORLD
    ),
    "functional all_gather in a list of ranks": lambda one: functional.all_gather_tensor_autograd(
        one, 0, [0]
    ),
    "functional reduce_scatter, by name": lambda one: functional.reduce_scatter_tensor_autograd(
        one, "sum", 0, dist.group.WORLD.group_name
    ),
}


@pytest.fixture(params=["ft", "ft:gloo"])
def place(request: pytest.FixtureRequest, store: dist.TCPStore) -> Iterator[str]:
    leave_default_group()
    limit = timedelta(seconds=20)
    dist.init_process_group(request.param, store=store, rank=0, world_size=1, timeout=limit)
    yield f"127.0.0.1:{store.port}/next"
    leave_default_group()


def loss_of(name: str, parameter: torch.Tensor) -> torch.Tensor:
    found = COLLECTIVES[name](2 * parameter)
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    return torch.stack([one.sum() for one in results]).sum()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_backward_of_an_older_generation_raises(place, name):
    parameter = torch.ones(2, requires_grad=True)
    current = loss_of(name, parameter)
    current.backward()
    assert parameter.grad.tolist() == [2.0, 2.0]
    stale = loss_of(name, parameter)
    torchft_ext.backend().configure(place, 0, 1)
    with pytest.raises(CommAbortedError, match="its forward ran in generation 1, this is gen"):
        stale.backward()
    assert parameter.grad.tolist() == [2.0, 2.0]
    loss_of(name, parameter).backward()
    assert parameter.grad.tolist() == [4.0, 4.0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_groups_of_others_are_left_alone(store):
    leave_default_group()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parameter = torch.ones(2, requires_grad=True)
    loss_of("all_reduce", parameter).backward()
    assert parameter.grad.tolist() == [2.0, 2.0]
    leave_default_group()


IMPORTED_BEFORE = """
import torch
import torch.distributed as dist
from torch.distributed.nn import all_gather
from torch.distributed.nn.functional import all_reduce

store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group("ft", store=store, rank=0, world_size=1)
parameter = torch.ones(2, requires_grad=True)
stale = [all_reduce(parameter).sum(), all_gather(parameter)[0].sum()]
import torchft_ext
torchft_ext.backend().configure(f"127.0.0.1:{store.port}/next", 0, 1)
for each in stale:
    try:
        each.backward()
    except torchft_ext.CommAbortedError as error:
        print(error)
"""


def test_functions_that_were_imported_before_the_package_are_guarded_too():
    command = [sys.executable, "-W", "ignore", "-c", IMPORTED_BEFORE]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line.split(" on ")[0] for line in done.stdout.splitlines()] == [
        "backward of all_reduce",
        "backward of all_gather",
    ]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("backend", ["gloo", "ft"])
def test_a_compiled_function_calls_them(store, backend):
    leave_default_group()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    compiled = torch.compile(lambda one: autograd_collectives.all_reduce(one) * 2, backend="eager")
    parameter = torch.ones(2, requires_grad=True)
    compiled(parameter).sum().backward()
    assert parameter.grad.tolist() == [2.0, 2.0]
    leave_default_group()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_backward_of_a_backward_of_an_older_generation_raises(place):
    parameter = torch.ones(2, requires_grad=True)
    loss = (autograd_collectives.all_reduce(parameter) ** 2).sum()
    (first,) = torch.autograd.grad(loss, parameter, create_graph=True)
    torchft_ext.backend().configure(place, 0, 1)
    with pytest.raises(CommAbortedError, match="its forward ran in generation 1, this is gen"):
        first.sum().backward()
