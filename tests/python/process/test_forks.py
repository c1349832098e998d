"""Forked children: what they inherit raises and never hangs, and their end is nobody's death."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from children import CHILD_LIMIT, answers_of_child, end_of_child
from ranks import World
from rankside import backend, errored, failure_of, kept
from test_features import average_gradients, batch_of, make_model
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset
from values import check, check_sum, me

from torchft_ext import process_group as pgs

ROUNDS = 10  # of sums and messages after a child's end, in which its traces would show
CHILDREN = 15

Actions = dict[str, Callable[[], object]]


def issue_works() -> tuple[dist.Work, dist.Work]:
    """One that is complete, and one that is not before the other rank sends."""
    finished = dist.barrier(async_op=True)
    finished.wait()
    kept["received"] = torch.zeros(4)
    return finished, dist.irecv(kept["received"], 1 - me()[0])


def uses_of_group() -> Actions:
    tensor, peer = torch.ones(4), 1 - me()[0]
    return {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "barrier": dist.barrier,
        "send": lambda: dist.send(tensor, peer),
        "recv": lambda: dist.recv(tensor, peer),
        "configure": lambda: backend().configure("127.0.0.1:1/x", 0, 1),
        "abort": lambda: backend().abort("in the child"),
        "errored": lambda: backend().errored(),
        "stats": lambda: backend().stats(),
        "check": lambda: backend().check(),
        "shrink": lambda: backend().shrink([peer], 0),
        "split_group": lambda: c10d._get_default_group().split_group([0, 1]),
        "new_group": dist.new_group,
        "shutdown": lambda: backend().shutdown(),
        "destroy_process_group": dist.destroy_process_group,
    }


def uses_of_works(finished: dist.Work, pending: dist.Work) -> Actions:
    calls = ("wait", "is_completed", "is_success", "exception", "result", "get_future")
    return {
        f"{call} of the {which} work": getattr(work, call)
        for which, work in (("finished", finished), ("pending", pending))
        for call in calls
    }


def uses_of_future(finished: dist.Work) -> Actions:
    """Made before the fork, it is torch's own, and complete."""
    future = finished.get_future()
    return {"future.done": future.done, "future.wait": future.wait, "future.value": future.value}


def use_in_child() -> tuple[dict[str, str], dict[str, str]]:
    """What became of each use of our own objects, and of torch's."""
    finished, pending = issue_works()
    ours = {**uses_of_works(finished, pending), **uses_of_group()}
    torchs = uses_of_future(finished)
    answers = answers_of_child({**torchs, **ours})
    dist.send(torch.full((4,), 7.0), 1 - me()[0])
    pending.wait()
    check(kept["received"], torch.full((4,), 7.0), "what came after the fork")
    check_sum()
    return {name: answers[name] for name in ours}, {name: answers[name] for name in torchs}


def test_forked_child_gets_errors_and_the_parent_goes_on(ranks):
    world = ranks.world(2)
    for ours, torchs in world.run(use_in_child):
        for name, answer in ours.items():
            assert answer.startswith("RuntimeError: "), (name, answer)
            assert "was made before fork()" in answer, (name, answer)
        assert set(torchs.values()) == {"returned"}, torchs
    assert world.run(errored) == [None, None]


def fork_beside_sums(rank_that_forks: int) -> None:
    """Sums are under way whenever a child is made, so locks of the engine's may be held."""
    rank, world = me()
    for _ in range(CHILDREN):
        tensors = [torch.ones(20_000) for _ in range(8)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        if rank == rank_that_forks:
            answers_of_child({**uses_of_works(works[0], works[-1]), **uses_of_group()})
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            check(tensor, torch.full_like(tensor, float(world)), "a sum beside a fork")


def test_children_made_while_operations_are_under_way_end(ranks):
    world = ranks.world(2)
    world.run(fork_beside_sums, 1)
    assert world.run(errored) == [None, None]


def raise_what_nobody_catches() -> None:
    raise RuntimeError("a child's own, which nobody catches")


def leave_in_vain() -> None:
    assert failure_of(dist.destroy_process_group) is not None


def drop_all_groups() -> None:
    """As destroy_process_group(), without its goodbyes: destructors run."""
    kept.clear()
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        table.clear()
    for table in (world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state):
        table.clear()
    c10d._update_default_pg(None)
    c10d._unregister_all_process_groups()
    gc.collect()


ENDS: dict[str, tuple[Callable[[], object], int]] = {
    "sys_exit": (lambda: sys.exit(3), 3),
    "exception": (raise_what_nobody_catches, 1),
    "os_exit": (lambda: os._exit(4), 4),
    "destroy_process_group": (leave_in_vain, 0),
    "groups_dropped": (drop_all_groups, 0),
}


def status_of_child(how: str) -> int:
    kept["under way"] = dist.irecv(torch.zeros(4), 0)  # destroyed in the child, beside the group
    status = end_of_child(ENDS[how][0])
    dist.send(torch.ones(1), 0)
    return status


def message_for_the_forking_rank() -> None:
    dist.recv(torch.zeros(1), 1)  # its child has ended
    dist.send(torch.ones(4), 1)


def talk() -> None:
    """Over both kinds of connections."""
    rank, _ = me()
    for _ in range(ROUNDS):
        check_sum()
        tensor = torch.ones(3)
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        dist.recv(tensor, 1) if rank == 0 else dist.send(tensor, 0)


def expect_no_death(world: World) -> None:
    """A member's would have failed the generation; that of an earlier world's may be noticed
    late."""
    assert world.run(errored) == [None, None]


@pytest.mark.parametrize("how", ENDS)
def test_end_of_a_forked_child_is_no_death(ranks, how):
    world = ranks.world(2)
    peer = world.start(0, message_for_the_forking_rank)
    assert world.on(1, status_of_child, how) == ENDS[how][1]
    peer.value()
    world.run(talk)
    expect_no_death(world)


def use_in_vain() -> None:
    assert failure_of(check_sum) is not None


def run_child_of_multiprocessing() -> int | None:
    child = multiprocessing.get_context("fork").Process(target=use_in_vain)
    child.start()
    child.join(CHILD_LIMIT)
    if child.exitcode is None:
        child.kill()
    return child.exitcode


def test_end_of_a_child_that_multiprocessing_forks_is_no_death(ranks):
    world = ranks.world(2)
    assert world.run(run_child_of_multiprocessing) == [0, 0]
    world.run(talk)
    expect_no_death(world)


class Batches(Dataset):
    """Which the workers of a loader make."""

    def __init__(self, rank: int, steps: int) -> None:
        self._rank, self._steps = rank, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> torch.Tensor:
        return batch_of(self._rank, step)


def loader_of(dataset: Dataset, workers: int) -> DataLoader:
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        timeout=CHILD_LIMIT,
        multiprocessing_context="fork",
    )


def train_with_loader(steps: int) -> int:
    """How many batches came; all workers have ended when it returns."""
    rank, world = me()
    model, count = DistributedDataParallel(make_model()), 0
    for step, batch in enumerate(loader_of(Batches(rank, steps), workers=2)):
        expected = average_gradients(model.module, world, step)
        model.zero_grad()
        model(batch).square().mean().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        count += 1
    assert multiprocessing.active_children() == []
    return count


def test_ranks_train_on_what_workers_of_a_data_loader_give(ranks):
    world = ranks.world(2)
    assert world.run(train_with_loader, 6) == [6, 6]
    world.run(talk)
    expect_no_death(world)


class Place(IterableDataset):
    """Datasets ask for it in the worker, to give each rank its part."""

    def __iter__(self) -> Iterator[list[int]]:
        group = dist.group.WORLD
        yield [dist.get_rank(), dist.get_world_size(), group.rank(), group.size()]


def place_in_worker() -> list[list[int]]:
    return list(loader_of(Place(), workers=1))


def test_worker_of_a_data_loader_knows_the_rank_and_size_of_its_generation(ranks):
    world = ranks.world(3)
    for order in ([0, 1, 2], [2, 0]):
        size = len(order)
        places = world.next(order).run(place_in_worker)
        assert places == [[[rank, size, rank, size]] for rank in range(size)]


def end_of_a_child_that_collects_a_group(kind: str, address: str) -> int:
    """The child's exit status. What it collects, its parent has let go of, in a cycle."""
    gc.collect()  # what earlier tests have left is not looked at
    gc.disable()
    try:
        group = getattr(pgs, kind)(timeout=CHILD_LIMIT)
        group.configure(address, 0, 1)
        group.allreduce([torch.ones(4)]).wait()
        cycle = [group]
        cycle.append(cycle)
        del group, cycle
        return end_of_child(gc.collect)
    finally:
        gc.enable()
        gc.collect()


GROUPS = ("ProcessGroupHost", "ProcessGroupGloo", "ProcessGroupBabyHost", "ProcessGroupBabyGloo")


@pytest.mark.parametrize("kind", GROUPS)
def test_child_that_collects_a_group_of_its_parent_goes_on(ranks, kind):
    address = ranks.address()
    world = ranks.world(1)
    assert world.on(0, end_of_a_child_that_collects_a_group, kind, address) == 0
