"""torchft_ext.elastic with sharded models: replicas of a fixed number of shards come and go."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import elastic_side
import pytest
import torch
from elastic_side import gradient, jobs, members, net
from ranks import World, values_of
from rankside import PATIENCE, wait_until
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchft_ext
from torchft_ext import elastic
from torchft_ext.elastic._shards import is_shard, local_of

SHARDS = 2
CLIPPED = 12  # steps
RATE = 0.01

world = members(5)

trainings: list[Training] = []
seen: list[tuple[int, int, int]] = []  # of each committed step: number, how many trained, cursor


def come(address: str, size: int, **options: object) -> None:
    seen.clear()
    elastic_side.come(address, size, **options)


class Training:
    """A sharded model that is wrapped anew for each view."""

    def __init__(self, before_clipping: Callable[[Training], None] | None = None) -> None:
        self.replicas = elastic.Replicas(SHARDS)
        self.sampler = elastic.BatchSampler(100, 2)
        self.state = elastic.State(self.sampler)
        self.before_clipping = before_clipping
        self.failures: list[tuple[int, bool]] = []  # of a step: its number, and whether it counts
        self.in_step: Callable[[int], None] = lambda number: None
        self.step_timeout: timedelta | None = None

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
        for step in elastic.steps(
            self.state,
            total,
            build=self.build,
            replicas=self.replicas,
            step_timeout=self.step_timeout,
        ):
            with step:
                self.in_step(step.number)
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


# A member that hangs.

released = threading.Event()


def release() -> None:
    released.set()


def train_or_hang(hangs: bool, total: int) -> tuple[int, bool, int, str]:
    released.clear()
    training = Training()
    training.step_timeout = timedelta(seconds=3)
    if hangs:
        training.in_step = lambda number: released.wait() if number == 5 else None
    return result_of(training, total, 0.0)


def test_member_that_hangs_is_left_out_where_another_one_holds_its_shard(ranks, world):
    founders = World(ranks, world.workers[:4])
    founders.run(come, ranks.address(), 4)
    calls = [founders.start(rank, train_or_hang, rank == 3, CLIPPED) for rank in range(4)]
    results = sorted(values_of(calls[:3]))
    assert [result[:3] for result in results[:2]] == [(CLIPPED, False, 0), (CLIPPED, False, 1)]
    assert results[2][:3] == (CLIPPED, True, -1)
    founders.side(3, release)
    calls[3].error("LeftOutError")


def test_member_that_hangs_with_the_only_copy_of_a_shard_is_waited_for(ranks, world):
    """In the job's first view."""
    founders = World(ranks, world.workers[:2])
    founders.run(come, ranks.address(), 2, timeout=timedelta(seconds=9))
    calls = [founders.start(rank, train_or_hang, rank == 1, CLIPPED) for rank in range(2)]
    error = calls[0].error("CommTimeoutError")
    assert "did not come" in error.text
    founders.side(1, release)
    calls[1].outcome()


def times_told(world: World) -> int:
    """Count the lines of the first member's log which say that it waits for the frozen one."""
    return world.workers[0].log().count("may hold the only copy of a shard")


def test_member_that_freezes_with_the_only_copy_of_a_shard_is_waited_for(ranks, world):
    founders = World(ranks, world.workers[:2])
    founders.run(come, ranks.address(), 2)
    told = times_told(founders)
    calls = founders.start_all(train, 60, 0.05)
    places_of(founders, 5)
    founders.freeze(1)
    wait_until(lambda: times_told(founders) > told, "the log says so")
    time.sleep(2)  # twice the limit
    founders.thaw(1)
    assert sorted(result[:3] for result in values_of(calls)) == [(60, False, 0), (60, False, 1)]


def test_it_is_not_waited_for_longer_than_a_step(ranks, world):
    founders = World(ranks, world.workers[:2])
    founders.run(come, ranks.address(), 2)
    told = times_told(founders)
    calls = [founders.start(rank, train_or_hang, False, 10**6) for rank in range(2)]
    places_of(founders, 5)
    founders.freeze(1)
    frozen = time.monotonic()
    assert "members holds shard" in calls[0].error("StateLostError").text
    assert time.monotonic() - frozen >= 3.0
    assert times_told(founders) > told
    founders.thaw(1)
    calls[1].error("LeftOutError")


# A failure while gradients are clipped, which sums over the shards of a replica.


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
