"""torchft_ext.elastic with sharded models: replicas of a fixed number of shards come and go."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from ranks import World, values_of
from rankside import (
    PATIENCE,
    connected_store,
    failure_of,
    leave_default_group,
    seconds,
    wait_until,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchft_ext
from torchft_ext import elastic
from torchft_ext.elastic import _view_groups
from torchft_ext.elastic._errors import StateLostError
from torchft_ext.elastic._replicas import Held, arrange
from torchft_ext.elastic._shards import is_shard, local_of

SHARDS = 2
RATE = 0.01

# Who trains where.


def holding(*pairs: tuple[int, int], step: int = 3) -> list[Held]:
    """Members that hold (replica, shard) of the job's newest step; (-1, -1): newcomers."""
    return [Held(r, s, s >= 0, step if s >= 0 else 0, s >= 0) for r, s in pairs]


def grid(held: Sequence[Held], shards: int = SHARDS) -> list[tuple[int, int] | None]:
    places = arrange(shards, held)
    return [None if place is None else (place.replica, place.shard) for place in places]


def test_founders_become_replicas_in_the_order_of_their_ranks():
    assert grid([Held()] * 5) == [(0, 0), (0, 1), (1, 0), (1, 1), None]
    ranks = [(place.rank, place.size) for place in arrange(2, [Held()] * 4)]
    assert ranks == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_whole_replicas_stay_and_the_rest_of_a_broken_one_is_parked():
    assert grid(holding((0, 0), (1, 0), (1, 1))) == [None, (0, 0), (0, 1)]
    assert grid(holding((0, 1), (1, 0), (1, 1), (2, 0), (2, 1)))[0] is None


def test_newcomer_takes_the_missing_shard_of_a_broken_replica():
    assert grid(holding((0, 0), (1, 0), (1, 1), (-1, -1))) == [(1, 0), (0, 0), (0, 1), (1, 1)]


def test_two_broken_replicas_make_a_whole_one():
    assert grid(holding((0, 1), (1, 0))) == [(0, 1), (0, 0)]


def test_a_holder_too_many_takes_another_shard():
    assert grid(holding((0, 0), (1, 0), (2, 0), (2, 1))) == [(1, 0), (1, 1), (0, 0), (0, 1)]


def test_parked_member_that_missed_a_step_does_not_count_as_a_holder():
    stale = Held(0, 0, False, 5, True)
    assert grid([stale, *holding((1, 0), (1, 1), step=5)]) == [None, (0, 0), (0, 1)]
    with pytest.raises(StateLostError, match="none of 2 members holds shard 0 of 2"):
        arrange(2, [stale, *holding((1, 1), step=5)])


def test_a_shard_without_a_holder_is_a_lost_state():
    for held in (holding((0, 0), (1, 0)), holding((0, 0), (-1, -1)), holding((0, 0))):
        with pytest.raises(StateLostError, match="holds shard 1 of 2"):
            arrange(2, held)


def test_too_few_members_are_all_parked():
    assert grid([Held()] * 3, shards=4) == [None] * 3


# On processes.

jobs: list[elastic.Job] = []
lasting: list[tuple[dist.ProcessGroup, nn.Module]] = []
trainings: list[Training] = []
seen: list[tuple[int, int, int]] = []  # of each committed step: number, how many trained, cursor


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def gradient(model: nn.Module, number: int) -> None:
    """The same on all that train, so that the result does not depend on how many do."""
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    model(inputs).square().mean().backward()


def come(address: str, size: int) -> None:
    leave_default_group()
    seen.clear()
    limits = {"limit": seconds(1.0), "timeout": seconds(PATIENCE)}
    jobs[:] = [elastic.join(address, size=size, min_size=1, **limits)]


def close() -> None:
    for job in jobs:
        job.close()
    jobs.clear()
    lasting.clear()
    leave_default_group()


class Training:
    """A sharded model that is wrapped anew for each view."""

    def __init__(self, before_clipping: Callable[[Training], None] | None = None) -> None:
        self.replicas = elastic.Replicas(SHARDS)
        self.sampler = elastic.BatchSampler(100, 2)
        self.state = elastic.State(self.sampler)
        self.before_clipping = before_clipping
        self.failures: list[tuple[int, bool]] = []  # of a step: its number, and whether it counts

    def build(self, view: elastic.View) -> dict[str, object]:
        self.model = net()
        fully_shard(self.model[0], mesh=self.replicas.mesh)
        fully_shard(self.model, mesh=self.replicas.mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=RATE)
        return {"model": self.model, "optimizer": self.optimizer}

    def update(self) -> None:
        if self.before_clipping is not None:
            self.before_clipping(self)
        nn.utils.clip_grad_norm_(self.model.parameters(), 100.0)  # communicates
        self.optimizer.step()

    def run(self, total: int, pause: float) -> None:
        for step in elastic.steps(self.state, total, build=self.build, replicas=self.replicas):
            with step:
                gradient(self.model, step.number)
                time.sleep(pause)
                step.commit(self.update)
            if step.failure is not None:
                self.failures.append((step.number, step.committed))
            if step.committed:
                seen.append((step.number, step.size, self.sampler.position))


def train(total: int, pause: float = 0.01) -> tuple[int, bool, int, str]:
    """Steps, whether the state is dirty, the shard, and whether it is what it should be."""
    return result_of(Training(), total, pause)


def result_of(training: Training, total: int, pause: float) -> tuple[int, bool, int, str]:
    """As train()."""
    trainings[:] = [training]
    training.run(total, pause)
    state, place = training.state, training.replicas.place
    if place is None:
        return state.step, state.dirty, -1, ""
    differs = differences(training.model, place.shard, state.step)
    return state.step, state.dirty, place.shard, differs or state.digest()


def differences(model: nn.Module, shard: int, steps: int) -> str:
    """From what one process gets that trains alone."""
    alone = net()
    optimizer = torch.optim.Adam(alone.parameters(), lr=RATE)
    for number in range(steps):
        optimizer.zero_grad()
        gradient(alone, number)
        optimizer.step()
    expected = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        assert is_shard(parameter)
        whole = expected[name].detach().chunk(SHARDS)
        part = whole[shard] if shard < len(whole) else whole[0][:0]
        if not torch.allclose(local_of(parameter), part, atol=1e-4):
            return f"{name}: {local_of(parameter)} instead of {part}"
    return ""


def place() -> tuple[int, int] | None:
    """Replica and shard."""
    found = trainings[0].replicas.place
    return None if found is None else (found.replica, found.shard)


def wait_for(count: int, size: int) -> None:
    """Until so many steps were committed by so many that train."""
    wait_until(lambda: sum(of == size for _, of, _ in seen) >= count, f"{count} steps of {size}")


def is_waiting_in(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


@pytest.fixture
def world(ranks) -> Iterator[World]:
    made = World(ranks, ranks.borrow(5))
    yield made
    for rank in range(made.size):
        if made.workers[rank].alive() and not made.workers[rank].busy():
            made.on(rank, close)


def test_broken_replica_is_parked_and_trains_on_with_a_newcomer(ranks, world):
    address = ranks.address()
    founders = World(ranks, world.workers[:4])
    founders.run(come, address, 4)
    calls = founders.start_all(train, 250)
    at = places_of(founders, 5)
    founders.kill(at[1, 1])
    founders.side(at[0, 0], wait_for, 5, 2)  # the other member of that replica is parked
    assert founders.side(at[1, 0], place) is None
    world.on(4, come, address, 4)
    late = world.start(4, train, 250)
    founders.side(at[1, 0], wait_for, 8, 4)
    results = values_of([*(calls[rank] for key, rank in at.items() if key != (1, 1)), late])
    assert [result[:2] for result in results] == [(250, False)] * 4
    digests = {result[2:] for result in results}
    assert sorted(shard for shard, _ in digests) == [0, 1], digests


def places_of(world: World, steps: int) -> dict[tuple[int, int], int]:
    """Which worker is where, once all have done so many steps."""
    for rank in range(world.size):
        world.side(rank, wait_for, steps, world.size)
    return {world.side(rank, place): rank for rank in range(world.size)}


def test_mesh_of_the_same_ranks_has_the_groups_of_its_own_view(ranks, world):
    """A third member is parked, and leaves the mesh as it was."""
    address = ranks.address()
    founders = World(ranks, world.workers[:2])
    founders.run(come, address, 2)
    calls = founders.start_all(train, 120)
    places_of(founders, 5)
    world.on(2, come, address, 2)
    late = world.start(2, train, 120)
    results = sorted(values_of([*calls, late]))
    assert [result[:3] for result in results] == [(120, False, 0), (120, False, 1), (120, True, -1)]
    assert not any("instead of" in result[3] for result in results)


def test_parked_members_end_with_the_run_and_say_that_their_state_is_stale(ranks, world):
    founders = World(ranks, world.workers[:3])
    founders.run(come, ranks.address(), 3)
    results = sorted(founders.run(train, 10))
    assert [result[:3] for result in results] == [(10, False, 0), (10, False, 1), (10, True, -1)]
    assert not any("instead of" in result[3] for result in results)


def test_lost_shard_is_told_to_all(ranks, world):
    founders = World(ranks, world.workers[:4])
    founders.run(come, ranks.address(), 4)
    calls = founders.start_all(train, 10**6)
    at = places_of(founders, 5)
    founders.kill(at[0, 1])
    founders.kill(at[1, 1])
    # Of shard 0 too there may be no whole copy: the second death may interrupt an update.
    ends = [calls[at[replica, 0]].outcome(2 * PATIENCE)[1] for replica in (0, 1)]
    lost = [end.type == "StateLostError" and "members holds shard" in end.text for end in ends]
    assert all(lost), "\n".join(end.traceback for end in ends)


# A failure while gradients are clipped, which sums over the shards of a replica.

CLIPPED = 12  # steps


def is_in_second_replica(training: Training, number: int) -> bool:
    """In the update of that step, as the job's first members."""
    place = training.replicas.place
    first = jobs[0].view().number == 1
    return first and training.state.step == number and place is not None and place.replica == 1


def fail_in_second_replica(number: int) -> Callable[[Training], None]:
    """One member ends the group that would have clipped."""

    def fail(training: Training) -> None:
        if is_in_second_replica(training, number) and training.replicas.place.shard == 1:
            torchft_ext.backend(training.replicas.mesh.get_group(1)).abort("the test says so")

    return fail


def die_in_second_replica(number: int) -> Callable[[Training], None]:
    """One member ends before it has said a word to the other."""

    def die(training: Training) -> None:
        if is_in_second_replica(training, number) and training.replicas.place.shard == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


ENDS = {"failure": fail_in_second_replica, "death": die_in_second_replica}


def train_with(end: str, number: int) -> tuple[tuple[int, bool, int, str], list[bool]]:
    """As train(); and of that step, whether it failed here and counts."""
    training = Training(ENDS[end](number))
    result = result_of(training, CLIPPED, 0.0)
    return result, [counts for failed, counts in training.failures if failed == number]


@pytest.mark.parametrize("number", [5, CLIPPED - 1])
def test_clipping_that_fails_in_one_replica_costs_its_state_only(ranks, world, number):
    founders = World(ranks, world.workers[:4])
    founders.run(come, ranks.address(), 4)
    results = founders.run(train_with, "failure", number)
    assert [result[:2] for result, _ in results] == [(CLIPPED, False)] * 4
    digests = {result[2:] for result, _ in results}
    assert sorted(shard for shard, _ in digests) == [0, 1], digests
    assert sorted(counts for _, counts in results) == [[], [], [True], [True]]


@pytest.mark.parametrize("number", [5, CLIPPED - 1])
def test_death_in_the_clipping_of_one_replica_leaves_the_other_whole(ranks, world, number):
    founders = World(ranks, world.workers[:4])
    founders.run(come, ranks.address(), 4)
    calls = founders.start_all(train_with, "death", number)
    results = sorted(call.value()[0] for call in calls if not call.died())
    assert [result[:3] for result in results[:2]] == [(CLIPPED, False, 0), (CLIPPED, False, 1)]
    assert not any("instead of" in result[3] for result in results)
    assert results[2][:3] == (CLIPPED, True, -1)  # the dead one's fellow is parked


def test_group_of_a_view_is_aborted_when_the_view_is_over(ranks, world):
    """Members 0 and 1 wait in a group that loses nobody; 2 asks for the next view."""
    founders = World(ranks, world.workers[:3])
    founders.run(come, ranks.address(), 3)
    at = founders.run(recover)
    pair = [founders.start(at.index(rank), fail_in_a_pair) for rank in (0, 1)]
    for rank in (0, 1):
        founders.side(at.index(rank), wait_for_threads, "elastic-view")
    third = founders.start(at.index(2), recover)
    told = values_of(pair)
    assert all("the view is over" in text for text in told), told
    assert third.value() == 2


def recover() -> int:
    return jobs[0].recover().rank


def wait_for_threads(name: str) -> None:
    wait_until(lambda: is_waiting_in(name), f"thread {name}")


def fail_in_a_pair() -> str:
    group = jobs[0].make_group("pair", [1, 0])
    assert dist.get_process_group_ranks(group) == [1, 0]
    try:
        dist.recv(torch.zeros(1), group=group, group_src=1 - group.rank())
    except Exception as error:
        jobs[0].recover()
        assert group not in dist.distributed_c10d._world.pg_map
        wait_until(lambda: not is_waiting_in("elastic-view"), "the end of the thread")
        return str(error)
    return "it received something"


def test_group_whose_member_dies_before_it_comes_is_given_up_at_once(ranks, world):
    founders = World(ranks, world.workers[:2])
    founders.run(come, ranks.address(), 2)
    at = founders.run(recover)
    waits = founders.start(at.index(0), time_of_a_lost_pair)
    founders.kill(at.index(1))
    kind, elapsed = waits.value()
    assert kind == "PeerLostError" and elapsed < PATIENCE / 2


def test_making_of_a_group_ends_with_the_view(ranks, world):
    """Member 1 never comes to the group; all of its members live."""
    founders = World(ranks, world.workers[:3])
    founders.run(come, ranks.address(), 3)
    at = founders.run(recover)
    keys = founders.on(at.index(1), keys_of_view)
    waits = founders.start(at.index(0), time_of_a_lost_pair)
    founders.on(at.index(1), wait_for_more_keys, keys)
    third = founders.start(at.index(2), recover)
    kind, elapsed = waits.value()
    assert kind in ("CommAbortedError", "StoreLostError") and elapsed < PATIENCE / 2
    rest = [founders.start(at.index(rank), recover) for rank in (0, 1)]
    assert values_of([*rest, third]) == [0, 1, 2]


def test_making_of_a_group_ends_with_an_abort_of_a_member_that_is_not_in_it(ranks, world):
    """Member 1 never comes; member 2 aborts, and nobody has asked for another view."""
    founders = World(ranks, world.workers[:3])
    founders.run(come, ranks.address(), 3)
    at = founders.run(recover)
    keys = founders.on(at.index(1), keys_of_view)
    waits = founders.start(at.index(0), time_of_a_lost_pair)
    founders.on(at.index(1), wait_for_more_keys, keys)
    founders.on(at.index(2), abort_job)
    kind, elapsed = waits.value()
    assert kind in ("CommAbortedError", "StoreLostError") and elapsed < PATIENCE / 2
    assert sorted(founders.run(recover)) == [0, 1, 2]


def abort_job() -> None:
    jobs[0].abort("the test says so")


def keys_of_view() -> int:
    """How many lie in the view's store."""
    return int(jobs[0]._native.store_of(jobs[0].view().number).num_keys())


def wait_for_more_keys(count: int) -> None:
    wait_until(lambda: keys_of_view() > count, "a member that waits for others in the store")


def time_of_a_lost_pair() -> tuple[str, float]:
    """How the making of a group ended, and after how long."""
    began = time.monotonic()
    end = failure_of(lambda: jobs[0].make_group("pair", [0, 1]))
    return "none" if end is None else end.type, time.monotonic() - began


def test_whole_group_ends_an_update_though_the_view_is_over(ranks, world):
    founders = World(ranks, world.workers[:3])
    founders.run(come, ranks.address(), 3)
    at = founders.run(recover)
    pair = [founders.start(at.index(rank), sum_in_a_pair_when_over) for rank in (0, 1)]
    for rank in (0, 1):
        founders.side(at.index(rank), wait_for_threads, "elastic-view")
    third = founders.start(at.index(2), recover)
    assert values_of(pair) == [(2.0, True)] * 2
    assert third.value() == 2


def sum_in_a_pair_when_over() -> tuple[float, bool]:
    """In a group that was held, and whether it fails afterwards."""
    group = jobs[0].make_group("pair", [0, 1])
    tensor = torch.ones(1)
    with jobs[0].hold_groups():
        wait_until(jobs[0].is_over, "the end of the view")
        wait_until(lambda: not is_waiting_in("elastic-view"), "the end of the thread")
        dist.all_reduce(tensor, group=group)
    total = tensor.item()
    failed = failure_of(lambda: dist.all_reduce(tensor, group=group)) is not None
    jobs[0].recover()
    return total, failed


def test_what_was_sent_in_an_update_arrives_though_the_view_ends_just_after_it(ranks, world):
    """Member 0 is through with its update when the view ends, member 1 is not."""
    founders = World(ranks, world.workers[:3])
    founders.run(come, ranks.address(), 3)
    at = founders.run(recover)
    gates = ranks.address()
    sender = founders.start(at.index(0), send_in_an_update, gates)
    receiver = founders.start(at.index(1), receive_late_in_an_update, gates)
    founders.on(at.index(2), wait_for_gate, gates, "sent")
    third = founders.start(at.index(2), recover)
    assert values_of([sender, receiver, third]) == [0, 1.0, 2]


def wait_for_gate(gates: str, name: str) -> None:
    connected_store(gates).wait([name], seconds(PATIENCE))


def send_in_an_update(gates: str) -> int:
    real, _view_groups._FLUSH_WITHIN = _view_groups._FLUSH_WITHIN, seconds(PATIENCE / 2)
    try:
        group = jobs[0].make_group("pair", [0, 1])
        with jobs[0].hold_groups() as committed:
            committed()
            dist.broadcast(torch.ones(1), group=group, group_src=0)  # without a word of the other
        connected_store(gates).set("sent", "")
        wait_until(jobs[0].is_over, "the end of the view")
        until = time.monotonic() + 0.3  # an abort would be there by then
        while is_waiting_in("elastic-view") and time.monotonic() < until:
            time.sleep(0.01)
        connected_store(gates).set("over", "")
        return recover()
    finally:
        _view_groups._FLUSH_WITHIN = real


def receive_late_in_an_update(gates: str) -> float:
    group = jobs[0].make_group("pair", [0, 1])
    tensor = torch.zeros(1)
    with jobs[0].hold_groups():
        wait_for_gate(gates, "over")
        dist.broadcast(tensor, group=group, group_src=0)
    recover()
    return tensor.item()


def test_groups_are_aborted_at_once_where_nothing_was_committed(ranks, world):
    alone = World(ranks, world.workers[:1])
    alone.run(come, ranks.address(), 1)
    assert alone.on(0, time_of_release, False) < 0.5 <= alone.on(0, time_of_release, True)


def time_of_release(commits: bool) -> float:
    """From the view's end until its groups are aborted, just after they were held."""
    real, _view_groups._FLUSH_WITHIN = _view_groups._FLUSH_WITHIN, seconds(0.6)
    try:
        options = torchft_ext.Options()
        groups = _view_groups.ViewGroups(dist.HashStore(), 1, "ft", options, seconds(PATIENCE))
        with groups.hold() as committed:
            if commits:
                committed()
        began = time.monotonic()
        groups._on_over()
        assert groups._over is not None
        return time.monotonic() - began
    finally:
        _view_groups._FLUSH_WITHIN = real


def test_thread_of_a_view_ends_with_the_job(ranks, world):
    founders = World(ranks, world.workers[:1])
    founders.run(come, ranks.address(), 1)
    founders.run(recover)
    founders.run(make_alone_and_close)


def make_alone_and_close() -> None:
    jobs[0].make_group("alone", [0])
    assert is_waiting_in("elastic-view")
    jobs[0].close()
    wait_until(lambda: not is_waiting_in("elastic-view"), "the end of the thread")


def pairs(view: elastic.View) -> list[int]:
    """Two neighbours, the higher rank first."""
    first = view.rank // 2 * 2
    return [rank for rank in (first + 1, first) if rank < view.size]


def manage_pairs() -> None:
    jobs[0].manage("pairs", rule=pairs)


def sum_of_pair() -> tuple[int, float, int]:
    """After recover(): the rank in the view, what the pair's ranks add up to, rank in the pair."""
    rank = recover()
    group = jobs[0].managed_group("pairs")
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    return rank, tensor.item(), group.rank()


def test_groups_of_a_rule_are_made_in_each_view(ranks, world):
    address = ranks.address()
    founders = World(ranks, world.workers[:4])
    founders.run(come, address, 4)
    founders.run(manage_pairs)
    found = founders.run(sum_of_pair)
    assert sorted(found) == [(0, 1.0, 1), (1, 1.0, 0), (2, 5.0, 1), (3, 5.0, 0)]
    lost = [rank for rank, _, _ in found].index(1)
    founders.kill(lost)
    rest = World(ranks, [worker for worker in founders.workers if worker.alive()])
    assert sorted(rest.run(sum_of_pair)) == [(0, 1.0, 1), (1, 1.0, 0), (2, 2.0, 0)]
    world.on(4, come, address, 4)
    world.on(4, manage_pairs)
    late = world.start(4, sum_of_pair)
    rest.side(0, wait_for_newcomer)
    found = values_of([*rest.start_all(sum_of_pair), late])
    assert sorted(found) == [(0, 1.0, 1), (1, 1.0, 0), (2, 5.0, 1), (3, 5.0, 0)]


def wait_for_newcomer() -> None:
    wait_until(lambda: bool(jobs[0].waiting()), "a newcomer")


# A lasting group of some members: the DDP over it is made once.


def whole_pairs(view: elastic.View) -> list[int]:
    """Two neighbours, the higher rank first; a last one alone is in no group."""
    ranks = pairs(view)
    return ranks if len(ranks) == 2 else []


def manage_a_lasting_group() -> None:
    group = dist.new_group([0])
    jobs[0].manage("pairs", group, whole_pairs)
    model = nn.Linear(1, 1, bias=False)
    lasting.append((group, DistributedDataParallel(model, process_group=group)))


def mean_of_pair() -> tuple[int, object]:
    """After recover(): the rank in the view, and a gradient of the pair or why there is none."""
    rank = recover()
    group, model = lasting[0]
    now = jobs[0].managed_group("pairs")
    if now is None:
        return rank, failure_of(lambda: dist.all_reduce(torch.ones(1), group=group)).text
    assert now is group and dist.get_process_group_ranks(group) == whole_pairs(jobs[0].view())
    model.zero_grad()
    model(torch.tensor([float(rank)])).backward()
    word = torch.tensor([rank])
    dist.broadcast(word, src=rank // 2 * 2, group=group)
    return rank, (model.module.weight.grad.item(), word.item())


def test_lasting_group_of_some_members_follows_the_views(ranks, world):
    address = ranks.address()
    founders = World(ranks, world.workers[:3])
    founders.run(come, address, 3)
    founders.run(manage_a_lasting_group)
    found = sorted(founders.run(mean_of_pair))
    assert found[:2] == [(0, (0.5, 0)), (1, (0.5, 0))]
    assert "this member is in no group 'pairs' in view 1" in found[2][1]
    world.on(3, come, address, 3)
    world.on(3, manage_a_lasting_group)
    late = world.start(3, mean_of_pair)
    founders.side(0, wait_for_newcomer)
    found = values_of([*founders.start_all(mean_of_pair), late])
    assert sorted(found) == [(0, (0.5, 0)), (1, (0.5, 0)), (2, (2.5, 2)), (3, (2.5, 2))]
    founders.kill([rank for rank, _ in found].index(1))
    rest = World(ranks, [worker for worker in world.workers[:4] if worker.alive()])
    found = sorted(rest.run(mean_of_pair))
    assert found[:2] == [(0, (0.5, 0)), (1, (0.5, 0))]
    assert "the view is over" in found[2][1]  # its last group's own end stays


def test_manage_wants_a_group_or_a_rule(ranks, world):
    alone = World(ranks, world.workers[:1])
    alone.run(come, ranks.address(), 1)
    assert alone.on(0, refused_by_manage) == [
        "ValueError",
        "ValueError",
        "RuntimeError",
        "KeyError",
    ]


def refused_by_manage() -> list[str]:
    job = jobs[0]
    calls = [
        lambda: job.manage("none"),
        lambda: job.manage("all", job.group, pairs),
        lambda: job.manage("default", rule=pairs),
        lambda: job.managed_group("default"),
    ]
    return [failure_of(call).type for call in calls]
