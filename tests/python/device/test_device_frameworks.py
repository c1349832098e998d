"""What torch builds on process groups works on devices: functional collectives, DTensor, tensor and
pipeline parallelism, objects, checkpoints. DDP and FSDP2: test_device_training.py."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from device_side import accelerator, check_sum, device, no_violation
from rankside import ErrorInfo, backend, failure_of, kept
from test_features import average_gradients, loss_of, make_model
from torch import nn
from values import check, me

NOTICE = 20.0  # seconds in which a failure must have reached everyone


def arange(count: int, first: float = 0.0) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32, device=device()) + first


# ---- functional collectives


def functional() -> None:
    rank, world = me()
    group = dist.group.WORLD
    mine = arange(6, rank)
    total = funcol.all_reduce(mine, "sum", group)
    check((total * 1).cpu(), sum(torch.arange(6.0) + r for r in range(world)), "all_reduce")
    gathered = funcol.all_gather_tensor(mine, 0, group)
    check((gathered * 1).cpu(), torch.cat([torch.arange(6.0) + r for r in range(world)]), "gather")
    part = funcol.reduce_scatter_tensor(arange(3 * world), "sum", 0, group)
    check((part * 1).cpu(), world * torch.arange(3.0 * rank, 3.0 * rank + 3), "reduce_scatter")
    shuffled = funcol.all_to_all_single(arange(world) * 0 + rank, None, None, group)
    check((shuffled * 1).cpu(), torch.arange(float(world)), "all_to_all")
    both = funcol.all_reduce_coalesced([mine, mine * 2], "sum", group)
    check((both[1] * 1).cpu(), (total * 2).cpu(), "all_reduce_coalesced")
    pair = funcol.all_gather_into_tensor_coalesced([mine, mine[:2]], group)
    check((pair[1] * 1).cpu(), torch.cat([torch.arange(2.0) + r for r in range(world)]), "pair")
    halves = funcol.reduce_scatter_tensor_coalesced(
        [arange(2 * world), arange(world)], "sum", [0, 0], group
    )
    check((halves[1] * 1).cpu(), torch.full((1,), float(rank * world)), "reduce_scatter_coalesced")
    check(mine.cpu(), torch.arange(6.0) + rank, "inputs are untouched")
    backend().check()
    no_violation()


@pytest.mark.parametrize("size", (1, 2, 3))
def test_functional_collectives_on_devices_give_their_results(devices, size):
    devices.world(size).run(functional)


def compiled() -> None:
    rank, world = me()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(mine: torch.Tensor) -> torch.Tensor:
        total = funcol.all_reduce(mine * 2, "sum", dist.group.WORLD)
        return funcol.all_gather_tensor(total + 1, 0, dist.group.WORLD) - 1

    expected = sum(2 * (torch.arange(4.0) + r) for r in range(world)).repeat(world)
    for _ in range(2):
        check(step(arange(4, rank)).cpu(), expected, "compiled")
    backend().check()
    no_violation()


def test_compiled_functional_collectives_on_devices(devices):
    world = devices.world(2)
    world.run(compiled)
    devices.next(world, [1]).run(compiled)


def functional_in_vain() -> ErrorInfo:
    def one() -> None:
        _ = funcol.all_reduce(arange(5), "sum", dist.group.WORLD) * 1
        backend().check()

    return failure_of(one)


def test_functional_collectives_on_devices_are_released_by_a_kill(devices):
    world = devices.world(3)
    world.run(check_sum)
    calls = [world.start_blocked(rank, functional_in_vain) for rank in (0, 2)]
    world.kill(1)
    for call in calls:
        error = call.value(NOTICE)
        assert error.type == "PeerLostError" and error.cause["rank"] == 1, error.text
    devices.next(world, [2, 0]).run(functional)


# ---- DTensor, tensor parallelism


def distributed_tensors() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh(accelerator.NAME, (me()[1],))
    torch.manual_seed(3)
    whole = torch.randn(7, 5)
    rows = distribute_tensor(whole.to(device()), mesh, [Shard(0)])
    check(rows.full_tensor().cpu(), whole, "uneven shards")
    columns = rows.redistribute(mesh, [Shard(1)])
    check(columns.full_tensor().cpu(), whole, "from rows to columns")
    other = distribute_tensor(torch.ones(5, 4, device=device()), mesh, [Replicate()])
    torch.testing.assert_close((rows @ other).full_tensor().cpu(), whole @ torch.ones(5, 4))
    torch.testing.assert_close(columns.sum(dim=1).full_tensor().cpu(), whole.sum(dim=1))
    backend().check()
    no_violation()


@pytest.mark.parametrize("size", (2, 3))
def test_dtensor_on_devices_shards_and_redistributes(devices, size):
    devices.world(size).run(distributed_tensors)


def tensor_parallel(mesh: dist.DeviceMesh) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(make_model().to(device()), mesh, plan)


def train_tensor_parallel(mesh: dist.DeviceMesh | None = None) -> None:
    """The same batch on all ranks: as one process alone would. mesh: else over all ranks."""
    model = tensor_parallel(mesh or dist.init_device_mesh(accelerator.NAME, (me()[1],)))
    reference = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        backend().check()
        optimizer.step()
        alone.zero_grad()
        loss_of(reference, 0, step).backward()
        alone.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor.full_tensor().cpu(), reference.state_dict()[name])
    no_violation()


def test_tensor_parallel_trains_like_one_process(devices):
    devices.world(2).run(train_tensor_parallel)


def wrap_in_two_dimensions() -> None:
    """Shards of tensor-parallel layers: FSDP2 over the outer, TP over the inner dimension."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(accelerator.NAME, (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    kept["mesh"], kept["model"] = mesh, model


def groups() -> list:
    import torchft_ext

    return [torchft_ext.backend(kept["mesh"].get_group(name)) for name in ("dp", "tp")]


def check_groups() -> None:
    for group in groups():
        group.check()
    backend().check()


def step_in_two_dimensions(step: int) -> float:
    """Gradients as one process has them, and their norm."""
    mesh, model = kept["mesh"], kept["model"]
    model.zero_grad()
    loss_of(model, mesh.get_local_rank("dp"), step).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor().cpu()
    check_groups()
    expected = average_gradients(make_model(), mesh["dp"].size(), step)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor().cpu(), gradient)
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in expected]).norm())
    no_violation()
    return float(norm)


def step_in_vain(step: int) -> ErrorInfo:
    """Whoever is told gives the step up, and tells those whose groups have lost nobody."""

    def one() -> None:
        loss_of(kept["model"], kept["mesh"].get_local_rank("dp"), step).backward()
        check_groups()

    error = failure_of(one)
    for group in groups():
        group.abort("the step is given up")
    return error


def go_on_as_a_pair(address: str) -> None:
    """The first tensor-parallel pair alone: its group begins a generation of its own."""
    import torchft_ext

    rank, mesh = me()[0], kept["mesh"]
    backend().configure(f"{address}/all", rank, 2)
    torchft_ext.backend(mesh.get_group("tp")).configure(f"{address}/tp", rank, 2)
    train_tensor_parallel(mesh["tp"])


def test_fsdp2_by_tensor_parallel_is_told_of_a_kill_and_a_pair_goes_on(devices):
    pool = devices.pool
    world = devices.made_by_init("ft", pool.address(), pool.borrow(4))
    world.run(wrap_in_two_dimensions)
    assert len(set(world.run(step_in_two_dimensions, 0))) == 1
    calls = [world.start(rank, step_in_vain, 1) for rank in (0, 1, 2)]
    world.kill(3)
    for call in calls:
        error = call.value(NOTICE)
        assert error.type in ("PeerLostError", "CommAbortedError"), error.text
    address = pool.address()
    for call in [world.start(rank, go_on_as_a_pair, address) for rank in (0, 1)]:
        call.value()


# ---- pipeline parallelism


def stage_of(model: nn.Module) -> nn.Module:
    return nn.Sequential(model[0], model[1]) if me()[0] == 0 else nn.Sequential(model[2])


def make_pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world = me()
    assert world == 2
    stage = stage_of(make_model()).to(device())
    kept["stage"] = stage
    pipeline = PipelineStage(stage, rank, world, device())
    kept["schedule"] = Schedule1F1B(pipeline, n_microbatches=4, loss_fn=mean_square)


def mean_square(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def batch() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(5))


def pipeline_step() -> None:
    if me()[0] == 0:
        kept["schedule"].step(batch().to(device()))
    else:
        kept["schedule"].step(target=torch.zeros(8, 3, device=device()))
    backend().check()


def check_pipeline() -> None:
    kept["stage"].zero_grad()
    pipeline_step()
    alone = make_model()
    alone(batch()).square().mean().backward()
    for mine, theirs in zip(kept["stage"].parameters(), stage_of(alone).parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
    no_violation()


def test_pipeline_trains_like_one_process_and_is_released_by_a_kill(devices):
    world = devices.world(2)
    world.run(make_pipeline)
    for _ in range(2):
        world.run(check_pipeline)
    call = world.start_blocked(0, failure_of, pipeline_step)
    world.kill(1)
    error = call.value(NOTICE)
    assert error.type == "PeerLostError" and error.cause["rank"] == 1, error.text
    devices.next(world, [0]).run(check_sum)


# ---- objects and checkpoints


def objects() -> None:
    rank, world = me()
    everyone: list[object] = [None] * world
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * (10 * rank)})
    assert everyone == [{"rank": r, "text": "x" * (10 * r)} for r in range(world)], everyone
    told = [f"from {rank}", rank]
    dist.broadcast_object_list(told, src=world - 1)
    assert told == [f"from {world - 1}", world - 1], told
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [[r] for r in range(world)] if rank == 0 else None, src=0)
    assert mine == [[rank]], mine
    backend().check()


@pytest.mark.parametrize("name", ("ft", "ft:nccl"))
def test_object_collectives_where_devices_are_served(devices, name):
    devices.world(3, name=name).run(objects)


def save_and_load(folder: str, beside: bool) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.fsdp import fully_shard

    model = make_model().to(device())
    fully_shard(model, mesh=dist.init_device_mesh(accelerator.NAME, (me()[1],)))
    whole = copy.deepcopy(make_model().state_dict())
    if beside:
        checkpoint.async_save(model.state_dict(), checkpoint_id=folder).result()
    else:
        checkpoint.save(model.state_dict(), checkpoint_id=folder)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    checkpoint.load(loaded, checkpoint_id=folder)
    for name, tensor in loaded.items():
        check(tensor.full_tensor().cpu(), whole[name], name)
    backend().check()
    no_violation()


@pytest.mark.parametrize("beside", (False, True))
def test_distributed_checkpoints_of_devices_are_saved_and_loaded(devices, tmp_path, beside):
    devices.world(2).run(save_and_load, str(tmp_path / "checkpoint"), beside)
