"""What tests of torchft_ext.process_group run in ranks: groups by kind, operations, waiters."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from ranks import Call, World, values_of
from rankside import ErrorInfo, describe, failure_of, kept, leave_default_group, wait_until
from torch._C._distributed_c10d import AllgatherOptions

from torchft_ext import process_group as pgs

LIMIT = 30.0  # seconds; gloo's own, after which it would notice by itself
names = itertools.count()


def join(kind: str, address: str, rank: int, size: int) -> None:
    if "group" not in kept:
        leave_default_group()
        kept["group"] = getattr(pgs, f"ProcessGroup{kind}")(timeout=LIMIT)
    kept["group"].configure(address, rank, size)


def world_of(ranks, size: int, kind: str = "Gloo") -> World:
    return joined(World(ranks, ranks.borrow(size)), kind)


def joined(world: World, kind: str = "Gloo") -> World:
    address = world.pool.address()
    values_of([world.start(r, join, kind, address, r, world.size) for r in range(world.size)])
    return world


def leave() -> None:
    kept.pop("group").shutdown()


def own(value: float = 0.0) -> torch.Tensor:
    return torch.arange(4.0) + 10 * kept["group"].rank() + value


def parts(count: int = 1) -> list[torch.Tensor]:
    """One for each rank."""
    return [own(100.0 * to)[:count].clone() for to in range(kept["group"].size())]


def empty(count: int = 1) -> list[torch.Tensor]:
    return [torch.full((count,), -1.0) for _ in range(kept["group"].size())]


def place(store: dist.TCPStore) -> str:
    """An address there that no other group has."""
    return f"127.0.0.1:{store.port}/place{next(names)}"


def with_op(options: object, op: object) -> object:
    options.reduceOp = op
    return options


def sums() -> list[torch.Tensor]:
    group, op = kept["group"], dist.ReduceOp
    average = with_op(dist.AllreduceOptions(), op.AVG)
    floats, integers, strided = own(), own().long(), own().reshape(2, 2).t()
    first, second, at_root = own(), own(1.0), own()
    group.allreduce([floats], average).wait()
    assert average.reduceOp == op.AVG
    group.allreduce([integers], op.AVG).wait()
    group.allreduce([strided]).wait()
    group.allreduce_coalesced([first, second]).wait()
    reduce_options = with_op(dist.ReduceOptions(), op.MAX)
    reduce_options.rootRank = 1
    group.reduce([at_root], reduce_options).wait()
    return [floats, integers, strided, first, second, at_root]


def scattered_sums() -> list[torch.Tensor]:
    group, op = kept["group"], dist.ReduceOp
    listed, based, averaged, two = (torch.empty(1), torch.empty(1), torch.empty(1), torch.empty(2))
    group.reduce_scatter([listed], [parts()]).wait()
    group._reduce_scatter_base(based, torch.cat(parts()), dist.ReduceScatterOptions()).wait()
    average = with_op(dist.ReduceScatterOptions(), op.AVG)
    inputs = [torch.cat(parts()), torch.cat(parts(2))]
    group.reduce_scatter_tensor_coalesced([averaged, two], inputs, average).wait()
    return [listed, based, averaged, two]


def exchanges() -> list[torch.Tensor]:
    group, rank, size = kept["group"], kept["group"].rank(), kept["group"].size()
    lists, single, gathered, based = empty(), torch.empty(size), empty(4), torch.empty(4 * size)
    root = size - 1
    group.alltoall(lists, parts()).wait()
    group.alltoall_base(single, torch.cat(parts()), [], []).wait()
    group.allgather([gathered], [own()]).wait()
    group._allgather_base(based, own(), AllgatherOptions()).wait()
    at_root = empty(4) if rank == root else []
    gather = dist.GatherOptions()
    gather.rootRank = root
    group.gather([at_root] if rank == root else [], [own()], gather).wait()
    scatter, piece = dist.ScatterOptions(), torch.empty(1)
    scatter.rootRank = root
    group.scatter([piece], [parts()] if rank == root else [], scatter).wait()
    sent = own()
    group.broadcast_one(sent, root).wait()
    group.barrier().wait()
    return [*lists, single, *gathered, based, *at_root, piece, sent]


def messages() -> list[torch.Tensor]:
    """From rank 0 to 1, whose receive has a future, and from 2 to whoever asks."""
    group, rank = kept["group"], kept["group"].rank()
    tensor, anyone = own(), own()
    if rank == 0:
        group.send([tensor], 1, 7).wait()
    elif rank == 1:
        (tensor,) = group.recv([tensor], 0, 7).get_future().wait()
        work = group.recv_anysource([anyone], 8)
        work.wait()
        assert work._source_rank() == 2
    else:
        group.send([anyone], 1, 8).wait()
    return [tensor, anyone]


def results_of(operations: Callable[[], list[torch.Tensor]]) -> list[object]:
    return [tensor.tolist() for tensor in operations()]


def blocked_sum() -> tuple[ErrorInfo, list[float]]:
    """A sum that not all ranks take part in; its failure, and the tensor after it."""
    tensor = own()
    error = failure_of(lambda: kept["group"].allreduce([tensor]).wait())
    assert error is not None
    return error, (tensor - own()).tolist()


def await_blocked() -> None:
    generation = kept["group"]._formed.generation
    wait_until(lambda: generation.busy() > 0, "an operation")


def start_blocked(
    world: World, count: int, blocked: Callable[[], tuple[ErrorInfo, object]] = blocked_sum
) -> list[Call]:
    calls = [world.start(rank, blocked) for rank in range(count)]
    for rank in range(count):
        world.side(rank, await_blocked)
    return calls


def whole_sum() -> float:
    tensor = own()
    kept["group"].allreduce([tensor]).wait()
    return tensor[0].item() + 6


def abort() -> float:
    began = time.monotonic()
    kept["group"].abort()
    return began


def join_failing(address: str, rank: int, size: int) -> ErrorInfo:
    error = failure_of(lambda: join("Gloo", address, rank, size))
    assert error is not None
    return error


def await_failure() -> ErrorInfo:
    group = kept["group"]
    wait_until(lambda: group.errored() is not None, "errored()")
    return describe(group.errored())


def held() -> dict[str, int]:
    """Threads and descriptors of this process."""
    return {name: len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")}
