"""torchft_ext.replace_gloo(): programs that say "gloo" run on this package's groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from datetime import timedelta

import pytest
import rankside
import torch
import torch.distributed as dist
from ranks import World
from rankside import PATIENCE, connected_store, failure_of, leave_default_group, seconds
from torch.distributed import checkpoint
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import torchft_ext
from torchft_ext import _C

replacements: list[object] = []


@pytest.fixture
def world(ranks):
    """Workers in which "gloo" is replaced until the test ends."""
    made = World(ranks, ranks.borrow(3))
    made.run(begin)
    yield made
    made.run_at_the_end(end)


def begin() -> None:
    leave_default_group()
    replacements[:] = [torchft_ext.replace_gloo()]


def end() -> None:
    leave_default_group()
    for one in replacements:
        one.__exit__(None, None, None)
    replacements.clear()


def init(world: World, spec: str = "gloo") -> World:
    address = world.pool.address()
    calls = [
        world.start(rank, rankside.init_fresh, address, rank, world.size, spec)
        for rank in range(world.size)
    ]
    for call in calls:
        call.value()
    return world


def titles() -> tuple[str, str, list[str]]:
    from torch.profiler import profile

    with profile() as seen:
        dist.all_reduce(torch.ones(3))
    shown = [event.key for event in seen.key_averages() if "all_reduce" in event.key]
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return dist.group.WORLD.name(), backend.name(), [key for key in shown if ":" in key]


def test_names_and_profilers_say_gloo(world):
    for group, backend, shown in init(world).run(titles):
        assert (group, backend) == ("gloo", "gloo")
        assert shown == ["gloo:all_reduce"]
    # Kineto now has a thread in them, for which forked children would wait in exit().
    for rank in range(world.size):
        world.kill(rank)


def facts() -> tuple[str, str, bool, int, float]:
    group = dist.group.WORLD
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    found = group._get_backend(torch.device("cpu"))
    ours = torchft_ext.backends_of(group)
    return (
        dist.get_backend(),
        dist.get_backend_config(),
        isinstance(found, dist.ProcessGroupGloo),
        len(ours),
        tensor[0].item(),
    )


def test_default_group_is_ours_and_says_gloo(world):
    for name, config, is_gloo, ours, summed in init(world).run(facts):
        assert (name, is_gloo, ours, summed) == ("gloo", True, 1, 3.0)
        assert "cpu:gloo" in config


def test_rank_and_size_follow_a_generation(ranks, world):
    init(world).kill(2)
    few = World(ranks, world.workers[:2])
    assert few.on(0, text_of_failure).startswith("allreduce")
    address = ranks.address()
    calls = [few.start(rank, form, address, rank, 2) for rank in range(2)]
    assert [call.value() for call in calls] == [(rank, 2, 2.0) for rank in range(2)]


def text_of_failure() -> str:
    error = failure_of(lambda: dist.all_reduce(torch.ones(1)))
    assert error is not None
    return error.text


def form(address: str, rank: int, size: int) -> tuple[int, int, float]:
    torchft_ext.backend().configure(address, rank=rank, world_size=size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor.item()


def recorded() -> list[str]:
    dist.all_reduce(torch.ones(3))
    trace = torch._C._distributed_c10d._dump_fr_trace_json(backend="ft")
    return [entry["profiling_name"] for entry in json.loads(trace).get("entries", [])]


@pytest.mark.skipif(
    not hasattr(c10d, "_maybe_attach_flight_recorder"), reason="torch 2.15 has that recorder"
)
def test_torchs_recorder_sees_operations(world):
    for names in init(world).run(recorded):
        assert "ft:all_reduce" in names


def groups() -> list[object]:
    by_name = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=PATIENCE))
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    objects: list[object] = [None] * 3
    dist.all_gather_object(objects, dist.get_rank())
    dist.monitored_barrier(timeout=timedelta(seconds=PATIENCE))
    if dist.get_rank() < 2:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=by_name)
        assert tensor.item() == 2.0 and torchft_ext.backends_of(by_name)
    assert torchft_ext.backends_of(mesh.get_group("dp"))
    return objects


def test_groups_and_meshes_are_ours(world):
    assert init(world).run(groups) == [[0, 1, 2]] * 3


def direct(address: str, rank: int, by_options: bool) -> tuple[bool, float]:
    """As programs do that make a backend themselves."""
    store = connected_store(address)
    if by_options:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = seconds(PATIENCE)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        made = dist.ProcessGroupGloo(store, rank, 3, options)
    else:
        made = dist.ProcessGroupGloo(store, rank, 3, timeout=seconds(PATIENCE))
    tensor = torch.full((2,), float(rank))
    made.allreduce([tensor]).wait()
    return isinstance(made, _C.Backend) and isinstance(made, c10d.ProcessGroupGloo), tensor[
        0
    ].item()


@pytest.mark.parametrize("by_options", [False, True])
def test_class_makes_our_backends(ranks, world, by_options):
    address = ranks.address()
    calls = [world.start(rank, direct, address, rank, by_options) for rank in range(3)]
    assert [call.value() for call in calls] == [(True, 3.0)] * 3


def averaged() -> tuple[float, str]:
    torch.manual_seed(1)
    model = DDP(torch.nn.Linear(4, 1))
    model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    assert model.module.weight.grad is not None
    return model.module.weight.grad[0, 0].item(), dist.get_backend()


def test_ddp_trains(world):
    assert init(world).run(averaged) == [(2.0, "gloo")] * 3


def sharded_and_saved(folder: str) -> list[object]:
    """FSDP2 on a mesh, and a checkpoint that a thread writes over a group of its own."""
    mesh = init_device_mesh("cpu", (3,))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
    beside = dist.new_group(backend="gloo")
    saved = checkpoint.async_save(model.state_dict(), checkpoint_id=folder, process_group=beside)
    assert isinstance(saved, Future)
    saved.result(PATIENCE)
    wanted = [part.full_tensor() for part in model.state_dict().values()]
    for part in model.parameters():
        torch.nn.init.zeros_(part)
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id=folder, process_group=beside)
    loaded = [
        torch.equal(part.full_tensor(), was)
        for part, was in zip(state.values(), wanted, strict=True)
    ]
    return [*loaded, len(torchft_ext.backends_of(beside)), dist.get_backend(beside)]


def test_fsdp_trains_and_saves_in_the_background(world, tmp_path):
    folder = str(tmp_path)
    assert init(world).run(sharded_and_saved, folder) == [[True] * 4 + [1, "gloo"]] * 3


def own_use() -> tuple[int, float]:
    """Of gloo, by this package."""
    wrapped = dist.new_group(backend="ft:gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=wrapped)
    return len(torchft_ext.backends_of(wrapped)), tensor.item()


def test_our_groups_over_gloo_keep_gloo(world):
    assert init(world).run(own_use) == [(0, 3.0)] * 3


def test_block_ends_it():
    theirs = dist.ProcessGroupGloo
    with torchft_ext.replace_gloo():
        assert dist.ProcessGroupGloo is not theirs
        assert c10d.ProcessGroupGloo is dist.ProcessGroupGloo
        with torchft_ext.replace_gloo():
            pass
        assert dist.ProcessGroupGloo is not theirs, "an inner block ended it"
    assert dist.ProcessGroupGloo is theirs is torch._C._distributed_c10d.ProcessGroupGloo


PROGRAM = """
import torch, torch.distributed as dist
from torch.distributed import ProcessGroupGloo
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
print(type(backend).__module__, dist.get_backend(), isinstance(backend, ProcessGroupGloo))
"""


@pytest.mark.parametrize(
    ("variables", "module"),
    [
        ({"TORCHFT_EXT_REPLACE_GLOO": "1"}, "torchft_ext"),
        ({"TORCHFT_EXT_REPLACE_GLOO": "0"}, "torch"),
        ({}, "torch"),
        ({"TORCHFT_EXT_REPLACE_GLOO": "1", "TORCHFT_EXT_DISABLE": "1"}, "torch"),
    ],
)
def test_variable_says_so_at_import_torch(variables, module):
    found = run(variables)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[0].split(".")[0] == module
    assert found.stdout.split()[1:] == ["gloo", "True"]


def test_other_values_of_the_variable_are_refused():
    found = run({"TORCHFT_EXT_REPLACE_GLOO": "yes"})
    assert found.returncode != 0
    assert "TORCHFT_EXT_REPLACE_GLOO: expected '0' or '1', found 'yes'" in found.stderr


def test_log_says_so_once():
    found = run({"TORCHFT_EXT_REPLACE_GLOO": "1", "TORCH_CPP_LOG_LEVEL": "INFO"})
    assert found.stderr.count("asked for with 'gloo' are groups of torchft_ext") == 1
    assert "asked for with" not in run({"TORCH_CPP_LOG_LEVEL": "INFO"}).stderr


def run(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if "TORCHFT_EXT_REPLACE" not in name}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )
