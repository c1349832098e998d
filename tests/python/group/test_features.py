"""What torch builds on process groups works on this one, through deaths and changes of size."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from rankside import kept
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from values import check, check_sum, me


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batch_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    device = next(model.parameters()).device
    return model(batch_of(rank, step).to(device)).square().mean()


def average_gradients(model: nn.Module, world: int, step: int) -> list[torch.Tensor]:
    """What every rank must have after backward(): the mean over the world, computed alone."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for rank in range(world):
        (loss_of(alone, rank, step) / world).backward()
    return [parameter.grad for parameter in alone.parameters()]


def wrap_in_ddp() -> None:
    kept["ddp"] = DistributedDataParallel(make_model())


def train_ddp(steps: int, first: int = 0) -> None:
    model = kept["ddp"]
    rank, world = me()
    for step in range(first, first + steps):
        expected = average_gradients(model.module, world, step)
        model.zero_grad()
        loss_of(model, rank, step).backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad


@pytest.mark.parametrize("size", (1, 2, 4))
def test_ddp_averages_gradients(ranks, size):
    world = ranks.world(size)
    world.run(wrap_in_ddp)
    world.run(train_ddp, 4)


def test_ddp_divides_by_the_new_size_after_configure(ranks):
    world = ranks.world(3)
    world.run(wrap_in_ddp)
    world.run(train_ddp, 3)
    world = world.next([0, 2])
    world.run(train_ddp, 3, first=3)
    world.next([1]).run(train_ddp, 2, first=6)


def one_backward() -> None:
    loss_of(kept["ddp"], me()[0], 9).backward()


def backward_under_except() -> str:
    import torchft_ext

    try:
        one_backward()
    except torchft_ext.PeerLostError as error:
        return f"lost {error.cause.rank}"
    return "nothing was lost"


def test_except_around_backward_sees_the_death_and_ddp_goes_on_with_fewer(ranks):
    world = ranks.world(4)
    world.run(wrap_in_ddp)
    world.run(train_ddp, 3)
    blocked = [world.start_blocked(rank, backward_under_except) for rank in (0, 1, 3)]
    world.kill(2)
    assert [call.value(patience=20) for call in blocked] == ["lost 2"] * 3
    world = world.next([0, 1, 3])
    world.run(train_ddp, 3, first=3)


def test_ddp_goes_on_after_an_abort_in_its_first_backward(ranks):
    world = ranks.world(2)
    world.run(wrap_in_ddp)
    blocked = world.start_blocked(0, one_backward)
    world.side(0, abort_generation)
    blocked.error("CommAbortedError", patience=20)
    world.start(1, one_backward).error("CommAbortedError", patience=20)
    world = world.next()
    world.run(train_ddp, 3)


def abort_generation() -> None:
    import torchft_ext

    torchft_ext.backend().abort("in the middle of a backward")


def train_with_hook() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    rank, world = me()
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    expected = average_gradients(model.module, world, 0)
    loss_of(model, rank, 0).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0.05, atol=0.01)


def test_ddp_comm_hooks_get_their_futures(ranks):
    ranks.world(2).run(train_with_hook)


def uneven_inputs() -> int:
    from torch.distributed.algorithms.join import Join

    rank, _ = me()
    model = DistributedDataParallel(make_model())
    steps = 0
    with Join([model]):
        for step in range(2 + rank):
            loss_of(model, rank, step).backward()
            steps += 1
    return steps


def test_join_handles_uneven_inputs(ranks):
    assert ranks.world(2).run(uneven_inputs) == [2, 3]


def train_zero() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, world = me()
    model, reference = DistributedDataParallel(make_model()), make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    alone = torch.optim.Adam(reference.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        alone.zero_grad()
        sum(loss_of(reference, other, step) / world for other in range(world)).backward()
        alone.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_zero_optimizer_trains_like_one_process(ranks):
    ranks.fresh(2).run(train_zero)


def train_fsdp(mesh_shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    from torch.distributed.fsdp import fully_shard

    rank, world = me()
    mesh = dist.init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model, reference = make_model(), make_model()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        alone.zero_grad()
        sum(loss_of(reference, other, step) / world for other in range(world)).backward()
        alone.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


@pytest.mark.parametrize(
    ("size", "shape", "names"), [(2, (2,), ("shard",)), (4, (2, 2), ("replica", "shard"))]
)
def test_fsdp2_trains_like_one_process(ranks, size, shape, names):
    ranks.fresh(size).run(train_fsdp, shape, names)


def functional() -> None:
    rank, world = me()
    group = dist.group.WORLD
    mine = torch.arange(6.0) + rank
    total = funcol.all_reduce(mine, "sum", group)
    check(total * 1, sum(torch.arange(6.0) + r for r in range(world)), "all_reduce")
    gathered = funcol.all_gather_tensor(mine, 0, group)
    check(gathered * 1, torch.cat([torch.arange(6.0) + r for r in range(world)]), "all_gather")
    part = funcol.reduce_scatter_tensor(torch.arange(3.0 * world), "sum", 0, group)
    check(part * 1, world * torch.arange(3.0 * rank, 3.0 * rank + 3), "reduce_scatter")
    shuffled = funcol.all_to_all_single(torch.full((world,), float(rank)), None, None, group)
    check(shuffled * 1, torch.arange(float(world)), "all_to_all")
    check(funcol.broadcast(mine, world - 1, group) * 1, torch.arange(6.0) + world - 1, "broadcast")
    both = funcol.all_reduce_coalesced([mine, mine * 2], "sum", group)
    check(both[1] * 1, total * 2, "all_reduce_coalesced")
    pair = funcol.all_gather_into_tensor_coalesced([mine, mine[:2]], group)
    assert pair[0].numel() == 6 * world and pair[1].numel() == 2 * world
    halves = funcol.reduce_scatter_tensor_coalesced(
        [torch.ones(2 * world), torch.ones(world)], "sum", [0, 0], group
    )
    check(halves[0] * 1, torch.full((2,), float(world)), "reduce_scatter_coalesced")
    assert mine[0] == rank  # inputs are untouched


@pytest.mark.parametrize("size", (1, 2, 3))
def test_functional_collectives_give_their_results(ranks, size):
    ranks.fresh(size).run(functional)


def functional_failure() -> str:
    import torchft_ext

    torchft_ext.backend().abort("before a functional collective")
    with pytest.raises(torchft_ext.CommAbortedError):
        _ = funcol.wait_tensor(funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD)) + 1
    return "raised"


def test_functional_collectives_raise_the_generations_error(ranks):
    world = ranks.fresh(2)
    assert world.on(0, functional_failure) == "raised"
    world.next().run(check_sum)


def distributed_tensors() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    _, world = me()
    mesh = dist.init_device_mesh("cpu", (world,))
    torch.manual_seed(3)
    whole = torch.randn(7, 5)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    check(rows.full_tensor(), whole, "uneven shards")
    columns = rows.redistribute(mesh, [Shard(1)])
    check(columns.full_tensor(), whole, "from rows to columns")
    other = distribute_tensor(torch.ones(5, 4), mesh, [Replicate()])
    product = (rows @ other).full_tensor()
    torch.testing.assert_close(product, whole @ torch.ones(5, 4))
    total = columns.sum(dim=1).full_tensor()
    torch.testing.assert_close(total, whole.sum(dim=1))


@pytest.mark.parametrize("size", (2, 3))
def test_dtensor_shards_and_redistributes(ranks, size):
    ranks.fresh(size).run(distributed_tensors)


def save_and_load(folder: str) -> None:
    import torch.distributed.checkpoint as checkpoint

    rank, _ = me()
    saved = {"model": make_model().state_dict(), "step": torch.tensor(5)}
    checkpoint.save(saved, checkpoint_id=folder)
    loaded = {
        "model": {name: torch.zeros_like(t) for name, t in saved["model"].items()},
        "step": torch.tensor(0),
    }
    checkpoint.load(loaded, checkpoint_id=folder)
    for name, tensor in saved["model"].items():
        check(loaded["model"][name], tensor, (rank, name))
    assert loaded["step"] == 5


def test_distributed_checkpoints_are_saved_and_loaded(ranks, tmp_path):
    ranks.fresh(2).run(save_and_load, str(tmp_path / "checkpoint"))
