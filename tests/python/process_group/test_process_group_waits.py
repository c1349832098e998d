"""Works of torchft_ext.process_group take a limit in wait(), in every state of their group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

import torchft_ext
from torchft_ext import process_group as pgs

LIMIT = timedelta(seconds=20)
MADE: dict[str, Callable[[], pgs.ProcessGroup]] = {
    "Host": lambda: pgs.ProcessGroupHost(timeout=LIMIT),
    "Gloo": lambda: pgs.ProcessGroupGloo(timeout=LIMIT),
    "Backend": lambda: pgs.ProcessGroupBackend("gloo", timeout=LIMIT),
    "NCCL over Host": lambda: pgs.ProcessGroupNCCL(pgs.ProcessGroupHost(timeout=LIMIT)),
    "BabyHost": lambda: pgs.ProcessGroupBabyHost(timeout=LIMIT),
    "BabyGloo": lambda: pgs.ProcessGroupBabyGloo(timeout=LIMIT),
    "Dummy": pgs.ProcessGroupDummy,
}
KINDS = list(MADE)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{store.port}"
    del store


def made(kind: str, place: str) -> pgs.ProcessGroup:
    """A group of one rank."""
    group = MADE[kind]()
    group.configure(place, 0, 1)
    return group


def works_of(group: dist.ProcessGroup) -> Iterator[dist.Work]:
    one = torch.ones(1)
    yield group.allreduce([one])
    yield group.allreduce([one], dist.AllreduceOptions())
    yield group.broadcast([one], dist.BroadcastOptions())
    yield group.allgather([[torch.empty(1)]], [one])
    yield group.allreduce_coalesced([one, one.clone()])
    yield group.allgather_into_tensor_coalesced([torch.empty(1)], [one])
    yield group.reduce([one], dist.ReduceOptions())
    yield group.gather([[torch.empty(1)]], [one], dist.GatherOptions())
    yield group.scatter([torch.empty(1)], [[one]], dist.ScatterOptions())
    yield group.reduce_scatter([torch.empty(1)], [[one]])
    yield group.reduce_scatter_tensor_coalesced([torch.empty(1)], [one])
    yield group.alltoall([torch.empty(1)], [one], dist.AllToAllOptions())
    yield group.alltoall_base(torch.empty(1), one, [], [])
    yield group.barrier()


def wait_in_every_way(group: dist.ProcessGroup) -> None:
    for work in works_of(group):
        assert work.wait(LIMIT)
        assert work.wait(timeout=LIMIT)
        assert work.wait()
        work.get_future().wait()
        assert work.is_completed()


@pytest.mark.parametrize("kind", KINDS)
def test_works_of_every_class_take_a_limit(address, kind):
    group = made(kind, f"{address}/plain{kind}")
    wait_in_every_way(group)
    wait_in_every_way(pgs.ProcessGroupWrapper(group))
    group.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_works_of_skipped_operations_take_a_limit(address, kind):
    group = made(kind, f"{address}/swallowing{kind}")
    swallowing = pgs.ErrorSwallowingProcessGroupWrapper(group)
    wait_in_every_way(swallowing)
    assert swallowing.error() is None
    swallowing.report_error(RuntimeError("a failure"))
    wait_in_every_way(swallowing)
    group.shutdown()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Dummy"])
def test_limit_ends_a_wait_long_before_the_groups_own(address, kind):
    group = made(kind, f"{address}/late{kind}")
    began = time.monotonic()
    with pytest.raises(torchft_ext.CommTimeoutError):
        group.recv_anysource([torch.ones(1)], 6).wait(timedelta(milliseconds=20))
    assert time.monotonic() - began < LIMIT.total_seconds() / 2
    group.shutdown()


def test_works_of_a_managed_group_take_a_limit():
    group = pgs.ProcessGroupDummy()
    manager = SimpleNamespace(
        _pg=group,
        allreduce=lambda tensor, reduce_op: group.allreduce([tensor]),
        num_participants=lambda: 1,
        errored=lambda: None,
        report_error=pytest.fail,
    )
    wait_in_every_way(pgs.ManagedProcessGroup(manager))


class OverFutures(pgs.ProcessGroupDummy):
    """A group of the program's, whose works torch makes of futures."""

    def __init__(self) -> None:
        super().__init__()
        self.future: Future[list[torch.Tensor]] = Future()

    def allreduce(self, tensors: object, opts: object = None) -> dist.Work:
        return _create_work_from_future(self.future)


def test_limit_holds_for_works_that_torch_makes_of_futures():
    group = OverFutures()
    swallowing = pgs.ErrorSwallowingProcessGroupWrapper(group)
    work = swallowing.allreduce([torch.ones(1)])
    later = threading.Timer(0.01, group.future.set_result, [[torch.ones(1)]])
    later.start()
    assert work.wait(LIMIT)
    later.join()
    assert swallowing.error() is None
    group.future = Future()
    late = swallowing.allreduce([torch.ones(1)])
    assert late.wait(timedelta(milliseconds=10))
    assert isinstance(swallowing.error(), TimeoutError)


@pytest.mark.parametrize("kind", [pgs.ProcessGroupGloo, pgs.ProcessGroupHost])
def test_the_longest_limit_is_waited_for(store, kind):
    group = pgs.ErrorSwallowingProcessGroupWrapper(kind(timeout=timedelta.max))
    group.configure(f"127.0.0.1:{store.port}/longest", 0, 1)
    options = dist.AllreduceOptions()
    options.timeout = timedelta.max
    tensor = torch.ones(2)
    assert group.allreduce([tensor], options).wait(timedelta.max)
    assert group.error() is None
    group.shutdown()


def test_the_longest_limit_holds_for_works_that_torch_makes_of_futures():
    group = OverFutures()
    swallowing = pgs.ErrorSwallowingProcessGroupWrapper(group)
    threading.Timer(0.01, group.future.set_result, [[torch.ones(1)]]).start()
    assert swallowing.allreduce([torch.ones(1)]).wait(timedelta.max)
    assert swallowing.error() is None
