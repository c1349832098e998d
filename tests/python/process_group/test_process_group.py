"""torchft_ext.process_group: torchft's process groups over this package's engine."""

from __future__ import annotations

import datetime
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import World, values_of
from rankside import OPERATION_LIMIT, failure_of, leave_default_group, wait_until
from torch._C._distributed_c10d import ErrorType, _create_work_from_future
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce
from torch.distributed._functional_collectives import wait_tensor
from torch.nn.parallel import DistributedDataParallel

from torchft_ext import CommTimeoutError
from torchft_ext import process_group as pgs

groups: dict[str, pgs.ProcessGroup] = {}


def made(kind: str) -> pgs.ProcessGroup:
    """This rank's group, made anew."""
    leave_default_group()
    groups["own"] = getattr(pgs, f"ProcessGroup{kind}")(timeout=OPERATION_LIMIT)
    return groups["own"]


def join(kind: str, address: str, rank: int, size: int) -> tuple[int, int]:
    group = made(kind)
    assert (group.rank(), group.size(), group.errored()) == (0, 1, None)
    group.configure(address, rank, size)
    return group.rank(), group.size()


def go_on(address: str, rank: int, size: int) -> float:
    """The same object, by torchft's longer form."""
    group = groups["own"]
    group.configure(
        address,
        "replica",
        rank,
        size,
        quorum_id=2,
        group_rank=0,
        group_world_size=1,
        global_ranks=[],
    )
    return summed()


def summed() -> float:
    tensor = torch.tensor([groups["own"].rank() + 1.0])
    groups["own"].allreduce([tensor]).wait()
    return tensor.item()


def every_operation() -> list[list[float]]:
    """One of each kind that torchft's own groups lack, too."""
    group = groups["own"]
    rank, size = group.rank(), group.size()
    own = torch.full((1,), float(rank))
    one = torch.full((1,), 5.0 + rank)
    group.broadcast_one(one, 1).wait()
    parts = [torch.empty(1) for _ in range(size)]
    group.alltoall(parts, [torch.full((1,), 10.0 * rank + to) for to in range(size)]).wait()
    scattered = torch.empty(1)
    group.reduce_scatter([scattered], [[own.clone() for _ in range(size)]]).wait()
    gathered = [torch.empty(1) for _ in range(size)]
    group.allgather([gathered], [own]).wait()
    group.barrier().wait()
    return [
        one.tolist(),
        torch.cat(parts).tolist(),
        scattered.tolist(),
        torch.cat(gathered).tolist(),
    ]


def world_of(ranks, size: int, kind: str = "Host") -> World:
    world, address = World(ranks, ranks.borrow(size)), ranks.address()
    calls = [world.start(rank, join, kind, address, rank, size) for rank in range(size)]
    assert values_of(calls) == [(rank, size) for rank in range(size)]
    return world


def leave() -> None:
    groups.pop("own").shutdown()


@pytest.mark.parametrize("kind", ["Host", "Gloo"])
def test_group_serves_torchs_collectives(ranks, kind):
    world = world_of(ranks, 3, kind)
    assert world.run(every_operation) == [
        [[6.0], [float(rank), 10.0 + rank, 20.0 + rank], [3.0], [0.0, 1.0, 2.0]]
        for rank in range(3)
    ]
    world.run(leave)


def failure_after_a_death() -> tuple[str, str]:
    group = groups["own"]
    raised = failure_of(lambda: group.allreduce([torch.ones(1)]).wait())
    assert raised is not None
    wait_until(lambda: group.errored() is not None, "errored()")
    return raised.type, type(group.errored()).__name__


@pytest.mark.parametrize("kind", ["Host", "Gloo"])
def test_survivors_go_on_with_the_same_object(ranks, kind):
    world = world_of(ranks, 3, kind)
    world.kill(2)
    survivors, address = World(ranks, world.workers[:2]), ranks.address()
    assert survivors.run(failure_after_a_death) == [("PeerLostError", "PeerLostError")] * 2
    calls = [survivors.start(rank, go_on, address, rank, 2) for rank in range(2)]
    assert values_of(calls) == [3.0, 3.0]
    survivors.run(leave)


def sum_after_shutdown(address: str, rank: int) -> float:
    group = made("Host")
    group.configure(f"{address}/before", rank, 2)
    group.shutdown()
    group.shutdown()
    group.configure(f"{address}/after", rank, 2)
    return summed()


def test_shut_down_group_may_be_configured_again(ranks):
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    calls = [world.start(rank, sum_after_shutdown, address, rank) for rank in range(2)]
    assert values_of(calls) == [3.0, 3.0]
    world.run(leave)


def registered_sum() -> tuple[float, float, list[int]]:
    """By functional collectives, plain and compiled, without a default group."""
    group = groups["own"].register("replicas")
    compiled = torch.compile(
        lambda tensor: wait_tensor(functional_all_reduce(tensor, "sum", "replicas")),
        backend="eager",
    )
    plain = wait_tensor(functional_all_reduce(torch.ones(2), "sum", "replicas"))
    known = c10d._world.pg_group_ranks[group]
    result = plain[0].item(), compiled(torch.ones(2))[0].item(), sorted(known)
    with pytest.raises(ValueError, match="expected a group without a name"):
        group.register("again")
    group.unregister()
    assert group not in c10d._world.pg_group_ranks
    return result


@pytest.mark.parametrize("kind", ["Host", "Gloo"])
def test_registered_group_serves_functional_collectives(ranks, kind):
    world = world_of(ranks, 2, kind)
    assert world.run(registered_sum) == [(2.0, 2.0, [0, 1])] * 2
    world.run(leave)


def trained(wrap: bool) -> list[float]:
    """Gradients of one DDP step, averaged over the group."""
    group = groups["own"]
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Linear(3, 2), process_group=pgs.ProcessGroupWrapper(group) if wrap else group
    )
    model(torch.full((1, 3), float(group.rank()))).sum().backward()
    return model.module.weight.grad.flatten().tolist()


@pytest.mark.parametrize("kind", ["Host", "Gloo"])
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "wrapped"])
def test_ddp_averages_over_the_group(ranks, kind, wrap):
    world = world_of(ranks, 3, kind)
    assert world.run(trained, wrap) == [[1.0] * 6] * 3
    world.run(leave)


def errors_of(group: dist.ProcessGroup) -> list[ErrorType]:
    """As torchft's Manager asks, since it has reconfigure(), whether a step may count."""
    return [group._get_backend(device).get_error() for device in group._device_types]


def swallowed(address: str) -> tuple[str, float, list[float], float]:
    """An error is kept and later operations are skipped, until configure()."""
    group = pgs.ErrorSwallowingProcessGroupWrapper(groups["own"])
    tensor = torch.ones(1)
    assert group.allreduce([tensor]).wait()
    wait_until(lambda: group.error() is not None or not group.allreduce([tensor]).wait(), "error()")
    kept = type(group.error()).__name__
    assert errors_of(group) == errors_of(groups["own"]) == [ErrorType.REMOTE_ERROR]
    skipped = torch.full((1,), 7.0)
    (given,) = group.allreduce([skipped]).get_future().wait()
    assert given.data_ptr() == skipped.data_ptr()
    assert group.broadcast_one(skipped, 0).wait()
    group.configure(address, group.rank(), 2)
    assert group.error() is None
    assert errors_of(group) == [ErrorType.SUCCESS]
    again = torch.ones(1)
    group.allreduce([again]).wait()
    return kept, skipped.item(), given.tolist(), again.item()


@pytest.mark.parametrize("kind", ["Host", "Gloo"])
def test_wrapper_that_swallows_errors_skips_until_configure(ranks, kind):
    world = world_of(ranks, 3, kind)
    world.kill(2)
    survivors, address = World(ranks, world.workers[:2]), ranks.address()
    expected = ("PeerLostError", 7.0, [7.0], 2.0)
    assert survivors.run(swallowed, address) == [expected] * 2
    survivors.run(leave)


def test_future_of_a_swallowed_failure_has_the_tensors():
    class Failing(pgs.ProcessGroupDummy):
        def allreduce(self, tensors, opts=None):
            future: torch.futures.Future = torch.futures.Future()
            future.set_exception(RuntimeError("the sum failed"))
            return _create_work_from_future(future)

    group = pgs.ErrorSwallowingProcessGroupWrapper(Failing())
    (tensor,) = group.allreduce([torch.full((1,), 2.0)]).get_future().wait()
    assert tensor.item() == 2.0
    assert "the sum failed" in str(group.error())


def test_managed_group_sums_through_the_manager():
    asked = []

    def allreduce(tensor, *, reduce_op):
        asked.append(reduce_op)
        return pgs.ProcessGroupDummy().allreduce([tensor.mul_(3)])

    manager = SimpleNamespace(
        _pg=pgs.ProcessGroupDummy(), allreduce=allreduce, num_participants=lambda: 3
    )
    group = pgs.ManagedProcessGroup(manager)
    tensor = torch.ones(1)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    assert group.allreduce([tensor], options).wait()
    assert group.allreduce([tensor], dist.ReduceOp.MAX).wait()
    assert group.allreduce([tensor]).wait()
    assert (group.size(), tensor.item()) == (3, 27.0)
    assert asked == [dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.SUM]


def test_dummy_copies_inputs_to_outputs():
    group = pgs.ProcessGroupDummy()
    source, target = torch.arange(4.0), torch.zeros(4)
    group.allgather([[target]], [source]).wait()
    assert torch.equal(target, source)
    group._reduce_scatter_base(target.zero_(), source).wait()
    assert torch.equal(target, source)
    group.allgather([[target.zero_(), torch.zeros(4)]], [source]).wait()  # for a size of another's
    assert torch.equal(target, source)
    (result,) = group.allreduce([source]).get_future().wait()
    assert result.data_ptr() == source.data_ptr()
    with pytest.raises(ValueError, match="expected rank 0 of 1, found rank 1 of 2"):
        pgs.ProcessGroupDummy(1, 2)


@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [
        ((0,), {}, "world_size: expected an int, found none"),
        (("a", 0), {}, "world_size: expected an int, found none"),
        ((0, 1, 2), {}, "found 1 arguments more"),
        ((0, 1), {"rank": 0}, "found rank twice"),
        ((0, 1), {"quorum_id": 0}, "found quorum_id which it does not know"),
        ((True, 1), {}, "rank: expected an int, found bool"),
    ],
)
def test_bad_arguments_of_configure_are_refused(args, kwargs, found):
    with pytest.raises(TypeError, match=found):
        pgs.ProcessGroupDummy().configure("localhost:1/x", *args, **kwargs)


def test_store_client_has_the_prefix_of_its_address():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = pgs.create_store_client(f"127.0.0.1:{server.port}/my/place", timeout=5.0)
    client.set("key", "value")
    assert server.get("my/place/key") == b"value"
    for address in ("nowhere", "host:port/x", ":1/x", "host:0/x"):
        with pytest.raises(ValueError, match="expected 'host:port/prefix'"):
            pgs.create_store_client(address)


@pytest.mark.parametrize("kind", ["Host", "Gloo", "BabyHost"])
def test_store_that_does_not_answer_is_named(kind):
    with socket.socket() as unheard:  # bound, and listening to nobody
        unheard.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{unheard.getsockname()[1]}"
        group = getattr(pgs, f"ProcessGroup{kind}")(timeout=0.2)
        for _ in range(2):
            with pytest.raises(CommTimeoutError, match=f"no answer from the store at {place}"):
                group.configure(f"{place}/job", 0, 2)
    group.shutdown()


@pytest.mark.parametrize("host", ["localhost", "::1", "[::1]", "fdaa:0:1:2:3:4:5:6"])
def test_store_client_is_connected_to_the_host_before_the_last_colon(monkeypatch, host):
    asked = []

    def connect(host_name: str, port: int, **_options: object) -> dist.Store:
        asked.append((host_name, port))
        return dist.HashStore()

    monkeypatch.setattr(dist, "TCPStore", connect)
    assert isinstance(pgs.create_store_client(f"{host}:29521/torchft/0"), dist.PrefixStore)
    assert asked == [(host.strip("[]"), 29521)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_nccl_group_says_what_it_lacks_and_stays_usable():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = pgs.ProcessGroupNCCL(timeout=5.0)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="'ft:nccl' needs NCCL"):
            group.configure(f"127.0.0.1:{server.port}/x", 0, 1)
    assert (group.rank(), group.size(), group.errored()) == (0, 1, None)
    group.abort()
    group.shutdown()


def test_timeout_is_seconds_or_a_timedelta():
    assert pgs.ProcessGroupHost(2.5)._timeout == datetime.timedelta(seconds=2.5)
