"""Arguments that groups of torchft_ext.process_group take, as torchft 0.2.0 has them, or refuse."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from torchft_ext import process_group as pgs

TIMEOUT = 20.0
TIMED = [
    pgs.ProcessGroupHost,
    pgs.ProcessGroupNCCL,
    pgs.ProcessGroupGloo,
    pgs.ProcessGroupBabyHost,
    pgs.ProcessGroupBabyGloo,
    pgs.ProcessGroupWrapper,
    lambda timeout: pgs.ProcessGroupBackend("gloo", timeout),
    lambda timeout: pgs.create_store_client("localhost:1/x", timeout),
]
NAMES = ["Host", "NCCL", "Gloo", "BabyHost", "BabyGloo", "Wrapper", "Backend", "store client"]


@pytest.mark.parametrize("make", TIMED, ids=NAMES)
@pytest.mark.parametrize("timeout", [-1.0, 0, float("nan"), timedelta(milliseconds=-1)])
def test_timeouts_that_are_not_positive_are_refused_at_construction(make, timeout):
    with pytest.raises(ValueError, match="timeout: expected a positive time, found"):
        make(timeout=timeout)


@pytest.mark.parametrize("timeout", [1e-9, 4e-7])
@pytest.mark.parametrize("make", TIMED, ids=NAMES)
def test_timeouts_below_a_microsecond_are_refused(make, timeout):
    with pytest.raises(ValueError, match="timeout: expected a microsecond at least, found"):
        make(timeout=timeout)


@pytest.mark.parametrize("make", TIMED, ids=NAMES)
def test_timeouts_that_are_no_times_are_refused_at_construction(make):
    for timeout in ("30", True):
        with pytest.raises(TypeError, match="timeout: expected seconds or a timedelta, found"):
            make(timeout=timeout)


GROUPS: dict[str, Callable[[], pgs.ProcessGroup]] = {
    "Host": lambda: pgs.ProcessGroupHost(timeout=TIMEOUT),
    "Gloo": lambda: pgs.ProcessGroupGloo(timeout=TIMEOUT),
    "BabyHost": lambda: pgs.ProcessGroupBabyHost(timeout=TIMEOUT),
    "Wrapper": lambda: pgs.ProcessGroupWrapper(pgs.ProcessGroupHost(timeout=TIMEOUT)),
    "Dummy": pgs.ProcessGroupDummy,
}


@pytest.mark.parametrize("kind", GROUPS)
def test_later_timeouts_that_are_not_positive_are_refused(kind):
    group = GROUPS[kind]()
    for timeout in (timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(ValueError, match="set_timeout: timeout: expected a positive time"):
            group.set_timeout(timeout)
    group.shutdown()


class MadeAnew(pgs.ProcessGroupWrapper):
    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        return pgs.ProcessGroupDummy()


@pytest.mark.parametrize(
    "kind", ["Host", "Gloo", "BabyHost", "Wrapper", "own Wrapper", "second Gloo"]
)
@pytest.mark.parametrize("prefix", ["", "/"])
def test_every_class_refuses_an_address_without_a_prefix(store, kind, prefix):
    makers = {
        **GROUPS,
        "own Wrapper": MadeAnew,
        "second Gloo": lambda: pgs.ProcessGroupGloo(pg=GROUPS["Gloo"]()),
    }
    group = makers[kind]()
    problem = "the prefix is empty" if prefix else "no '/prefix' after the port"
    with pytest.raises(ValueError, match=rf"configure: store_addr: expected .*: {problem}"):
        group.configure(f"127.0.0.1:{store.port}{prefix}", 0, 1)
    group.configure(f"127.0.0.1:{store.port}/{kind.replace(' ', '')}", 0, 1)
    group.shutdown()


@pytest.mark.parametrize("kind", GROUPS)
def test_abort_takes_torchfts_argument(store, kind):
    group = GROUPS[kind]()
    for errored in (True, False):
        group.configure(f"127.0.0.1:{store.port}/{kind}{errored}", 0, 1)
        group.abort(errored=errored)
        assert (group.errored() is None) == (kind == "Dummy")
    group.shutdown()


def test_gloo_over_another_gloo_is_a_second_object_of_it(store):
    first = pgs.ProcessGroupGloo(timeout=TIMEOUT)
    second = pgs.ProcessGroupGloo(TIMEOUT, first)
    second.configure(f"127.0.0.1:{store.port}/two", 0, 1)
    assert (first.size(), second.size(), first.errored()) == (1, 1, None)
    assert second.allreduce([torch.ones(1)]).wait() and first.allreduce([torch.ones(1)]).wait()
    second.abort()
    assert str(first.errored()) == str(second.errored()) != "None"
    second.shutdown()
    with pytest.raises(TypeError, match="expected a ProcessGroupGloo, found ProcessGroupDummy"):
        pgs.ProcessGroupGloo(pg=pgs.ProcessGroupDummy())


def test_baby_counts_operations_under_way(store):
    pair = [pgs.ProcessGroupBabyHost(timeout=TIMEOUT) for _ in range(2)]
    assert pair[0].num_active_work() == 0
    place = f"127.0.0.1:{store.port}/counted"
    with ThreadPoolExecutor() as pool:
        for begun in [pool.submit(pair[rank].configure, place, rank, 2) for rank in range(2)]:
            begun.result()
    sums = [group.allreduce([torch.ones(1)]) for group in pair]
    assert all(work.wait() for work in sums)
    assert pair[0].num_active_work() == 0
    works = [pair[0].recv([torch.ones(1)], 1, tag) for tag in range(3)]
    assert pair[0].num_active_work() == len(works)
    pair[0].abort()
    assert pair[0].num_active_work() == 0
    for group in pair:
        group.shutdown()


def test_last_reported_error_counts():
    group = pgs.ErrorSwallowingProcessGroupWrapper(pgs.ProcessGroupDummy())
    first, last = RuntimeError("first"), RuntimeError("last")
    group.report_error(first)
    group.report_error(last)
    assert group.error() is last
    group.configure("localhost:1/x", 0, 1)
    assert group.error() is None


class FailingWork(_c10d.Work):
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        raise RuntimeError("it failed")


class Failing(pgs.ProcessGroupDummy):
    """Fails when an operation is issued, or in its work."""

    at_issue = False

    def _issue(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> dist.Work:
        if self.at_issue:
            raise RuntimeError(f"{name} cannot begin")
        return FailingWork()


@pytest.mark.parametrize("at_issue", [False, True])
def test_managed_group_reports_every_operation_to_the_manager(at_issue):
    parent, reported = Failing(), []
    parent.at_issue = at_issue
    manager = SimpleNamespace(
        _pg=parent,
        allreduce=pytest.fail,
        num_participants=lambda: 1,
        errored=lambda: reported[0] if reported else None,
        report_error=reported.append,
    )
    group = pgs.ManagedProcessGroup(manager)
    one = torch.ones(1)
    operations: list[Callable[[], dist.Work]] = [
        lambda: group.broadcast_one(one, 0),
        lambda: group.allgather([[one]], [one]),
        lambda: group.reduce_scatter([one], [[one]]),
        lambda: group.barrier(),
        lambda: group.send([one], 0, 0),
        lambda: group.recv([one], 0, 0),
    ]
    for operation in operations:
        reported.clear()
        assert operation().wait(timedelta(seconds=1))
        assert len(reported) == 1
        assert operation().wait()  # skipped
        assert len(reported) == 1
