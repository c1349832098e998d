"""torchft_ext.elastic on real processes: who dies, freezes, leaves or comes stops nobody else."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import elastic_side
import pytest
import torch
import torch.distributed as dist
from elastic_side import close, jobs, members, wait_for_newcomer
from ports import free_ports
from ranks import World, values_of
from rankside import PATIENCE, failure_of, seconds, wait_errored, wait_until
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import torchft_ext
from torchft_ext import elastic

SAMPLES = 240
BATCH = 4

world = members(3)

committed: list[tuple[int, int, list[int]]] = []  # step, world size, this member's samples
stop_now = threading.Event()


def come(address: str | None, size: int, **options: object) -> str:
    committed.clear()
    return elastic_side.come(address, size, **options)


def come_without_a_store(members: list[str], listen: int, size: int) -> str:
    return come(None, size, members=members, listen=listen or None, key="known to all")


def train(
    steps: int, pause: float = 0.0, leave_at: int = -1, raise_at: int = -1
) -> tuple[int, str]:
    """Train up to that many steps; return how many were committed, and the state's digest."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 6)
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = elastic.BatchSampler(SAMPLES, BATCH, seed=1)
    state = elastic.State(model, optimizer, sampler)
    for step in elastic.steps(state, total=steps):
        with step:
            batch = sampler.indices()
            model(inputs[batch]).square().mean().backward()
            time.sleep(pause)
            if step.number == raise_at:
                raise ZeroDivisionError("of the user")
            step.commit(optimizer.step)
        if step.committed:
            committed.append((step.number, step.view.size, list(batch)))
        if step.number == leave_at:
            jobs[0].leave()
    return state.step, str(state.digest())


def train_passes(passes: int, pause: float) -> tuple[int, bool, str]:
    """So many passes over the data, or fewer where a member is told to stop."""
    stop_now.clear()
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 6)
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = elastic.BatchSampler(SAMPLES, BATCH, seed=1)
    state = elastic.State(model, optimizer, sampler)
    for step in elastic.steps(state, passes=passes):
        with step:
            model(inputs[sampler.indices()]).square().mean().backward()
            time.sleep(pause)
            if stop_now.is_set():
                step.stop()
            step.commit(optimizer.step)
        if step.committed:
            committed.append((step.number, step.view.size, []))
    return state.step, sampler.position >= passes * SAMPLES, str(state.digest())


def stop() -> None:
    stop_now.set()


def steps_done() -> int:
    return len(committed)


def all_committed() -> list[tuple[int, int, list[int]]]:
    return list(committed)


def wait_for_steps(count: int) -> None:
    wait_until(lambda: len(committed) >= count, f"{count} steps")


def sum_over_members() -> float:
    job = jobs[0]
    view = job.view() or job.recover()
    tensor = torch.tensor([view.rank + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


def waiting_count() -> int:
    return len(jobs[0].waiting())


def test_a_death_costs_one_step(ranks, world):
    address = ranks.address()
    world.run(come, address, 3)
    calls = world.start_all(train, 60, 0.005)
    for rank in range(3):
        world.side(rank, wait_for_steps, 15)
    world.kill(0)
    results = [calls[rank].value() for rank in (1, 2)]
    assert results[0] == results[1], "the members hold different state"
    assert results[0][0] == 60
    seen = {rank: world.on(rank, all_committed) for rank in (1, 2)}
    assert [step for step, _, _ in seen[1]] == list(range(60))
    assert [size for _, size, _ in seen[1]][-1] == 2
    assert_no_sample_twice(seen)


@pytest.mark.parametrize("passes", [6, 1000], ids=["passes", "stop"])
def test_members_and_newcomers_end_with_the_same_step(ranks, passes):
    """Of three one dies, and another process comes."""
    address = ranks.address()
    workers = ranks.borrow(4)
    world, newcomer = World(ranks, workers[:3]), World(ranks, workers[3:])
    world.run(come, address, 3)
    newcomer.on(0, come, address, 3)
    calls = world.start_all(train_passes, passes, 0.02)
    late = newcomer.start(0, train_passes, passes, 0.02)
    world.side(1, wait_for_steps, 10)
    world.kill(2)
    newcomer.side(0, wait_for_steps, 3)
    if passes == 1000:
        world.side(1, stop)
    results = [*values_of(calls[:2]), late.value()]
    assert len(set(results)) == 1
    assert results[0][1] == (passes == 6)


def assert_no_sample_twice(seen: dict[int, list[tuple[int, int, list[int]]]]) -> None:
    """Within each pass over the data, which the steps go through in order."""
    taken: list[int] = []
    for step in range(max(len(of) for of in seen.values())):
        for of in seen.values():
            taken += next((batch for number, _, batch in of if number == step), [])
    for begin in range(0, len(taken) - len(taken) % SAMPLES, SAMPLES):
        counts = torch.bincount(torch.tensor(taken[begin : begin + SAMPLES]))
        assert int(counts.max()) <= 2  # a pass may begin within a step


def test_a_newcomer_is_brought_up_to_date(ranks, world):
    address = ranks.address()
    first = World(ranks, world.workers[:2])
    world.on(2, steps_done)  # its imports take longer than the others need for their steps
    first.run(come, address, 2)
    calls = first.start_all(train, 400, 0.005)
    first.side(0, wait_for_steps, 10)
    world.on(2, come, address, 2)
    late = world.start(2, train, 400, 0.005)
    results = values_of([*calls, late])
    assert results[0] == results[1] == results[2]
    sizes = {size for _, size, _ in first.on(0, all_committed)}
    assert sizes == {2, 3}


def test_members_find_each_other_without_a_store(ranks):
    workers = ranks.borrow(4)
    world, newcomer = World(ranks, workers[:3]), World(ranks, workers[3:])
    ports = free_ports(3)
    members = [f"127.0.0.1:{port}" for port in ports]
    newcomer.on(0, free_ports, 1)  # its imports take their time
    values_of([world.start(i, come_without_a_store, members, ports[i], 3) for i in range(3)])
    calls = world.start_all(train, 600, 0.005)
    for rank in range(3):
        world.side(rank, wait_for_steps, 5)
    world.kill(0)
    newcomer.on(0, come_without_a_store, members, 0, 3)
    late = newcomer.start(0, train, 600, 0.005)
    results = [*values_of(calls[1:]), late.value()]
    assert results[0][0] == 600
    assert len({digest for _, digest in results}) == 1
    values_of([newcomer.start(0, close), world.start(1, close), world.start(2, close)])


def test_a_member_leaves_and_the_others_go_on(ranks, world):
    world.run(come, ranks.address(), 3)
    calls = [
        world.start(rank, train, 50, 0.002, leave_at=20 if rank == 1 else -1) for rank in range(3)
    ]
    results = values_of(calls)
    assert results[0] == results[2]
    assert results[0][0] == 50
    assert 20 < results[1][0] < 30


def test_members_hear_of_anothers_own_error_and_go_on_without_it(ranks, world):
    """They wait for its vote when it raises."""
    world.run(come, ranks.address(), 3)
    calls = [
        world.start(rank, train, 40, 0.002, raise_at=20 if rank == 1 else -1) for rank in range(3)
    ]
    calls[1].error("ZeroDivisionError")
    for rank in (0, 2):
        world.side(rank, wait_for_the_end_of_the_view)
    world.on(1, close)
    results = values_of([calls[0], calls[2]])
    assert results[0] == results[1] and results[0][0] == 40


def wait_for_the_end_of_the_view() -> None:
    wait_until(lambda: jobs[0].is_over(), "the end of the view")


Failures = list[tuple[int, bool]]


def train_with(update: str, steps: int) -> tuple[int, str, Failures]:
    """Steps, the state's digest, and of each step that failed the number and whether it counts."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = elastic.State(model, optimizer)
    failures: Failures = []
    for step in elastic.steps(state, total=steps):
        with step:
            model(torch.ones(4, 6) * step.number).square().mean().backward()
            before = UPDATES[update]
            step.commit(lambda of=step, first=before: first(of), optimizer.step)
        if step.failure is not None:
            failures.append((step.number, step.committed))
        committed.append((step.number, step.view.size, []))
    return state.step, str(state.digest()), failures


def talk_apart(step: elastic.Step) -> None:
    """The last two ranks exchange something when rank 0 is long done."""
    tensor = torch.zeros(1)
    if step.rank == step.size - 1:
        wait_until(lambda: step.number < 5 or bool(jobs[0].waiting()) or step.size > 3, "somebody")
        time.sleep(0.02)
        dist.send(tensor, step.size - 2)
    elif step.rank == step.size - 2:
        dist.recv(tensor, step.size - 1)


def test_update_that_communicates_ends_before_a_newcomer_is_taken_in(ranks, world):
    address = ranks.address()
    more = World(ranks, ranks.borrow(4))
    founders = World(ranks, more.workers[:3])
    founders.run(come, address, 3)
    calls = founders.start_all(train_with, "apart", 30)
    founders.side(0, wait_for_steps, 3)
    more.on(3, come, address, 3)
    late = more.start(3, train_with, "apart", 30)
    results = values_of([*calls, late])
    assert {result[:2] for result in results} == {results[0][:2]}
    assert [failures for _, _, failures in results] == [[]] * 4
    more.on(3, close)


def fail_once(step: elastic.Step, number: int = 3) -> None:
    """In one update, of rank 0 alone."""
    if step.number == number and step.rank == 0 and step.view.number == 1:
        torchft_ext.backend().abort("the test says so")
        dist.barrier()


def fail_at_the_end(step: elastic.Step) -> None:
    """In the last of eight updates."""
    fail_once(step, 7)


@pytest.mark.parametrize(("update", "number"), [("fail", 3), ("fail at the end", 7)])
def test_member_whose_update_failed_takes_the_state_of_another(ranks, world, update, number):
    world.run(come, ranks.address(), 3)
    results = world.run(train_with, update, 8)
    assert {result[:2] for result in results} == {(8, results[0][1])}
    assert [(number, True)] in [failures for _, _, failures in results]


def end_in_update(step: elastic.Step, number: int = 3) -> None:
    """Of the last rank in one step: before it has said a word to the others."""
    if step.number == number and step.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def clip_by_a_pair_at_the_end(step: elastic.Step) -> None:
    """The last rank ends in the last of eight updates."""
    clip_by_a_pair(step, 7)


def clip_by_a_pair(step: elastic.Step, number: int = 3) -> None:
    """Rank 0 waits for the last rank's part of a norm; others need none."""
    end_in_update(step, number)
    if step.rank == step.size - 1:
        dist.send(torch.ones(1), 0)
    elif step.rank == 0:
        dist.recv(torch.ones(1), step.size - 1)


def clip_by_all(step: elastic.Step) -> None:
    """All wait for the parts of all."""
    end_in_update(step)
    dist.all_reduce(torch.ones(1))


UPDATES = {
    "apart": talk_apart,
    "fail": fail_once,
    "fail at the end": fail_at_the_end,
    "clip by a pair": clip_by_a_pair,
    "clip by a pair at the end": clip_by_a_pair_at_the_end,
    "clip by all": clip_by_all,
}


def test_collective_that_fails_in_one_members_update_costs_its_state_only(ranks, world):
    world.run(come, ranks.address(), 3)
    calls = world.start_all(train_with, "clip by a pair", 8)
    results = [call.value() for call in calls if not call.died()]
    assert [result[0] for result in results] == [8, 8]
    assert results[0][1] == results[1][1], "the members hold different state"
    of_step = [[ok for number, ok in failures if number == 3] for _, _, failures in results]
    assert sorted(of_step) == [[], [True]], "it failed for one, counts, and was not repeated"


def test_result_is_handed_on_though_too_few_are_left_to_train(ranks, world):
    world.run(come, ranks.address(), 3, min_size=3)
    began = time.monotonic()
    calls = world.start_all(train_with, "clip by a pair at the end", 8)
    results = [call.value() for call in calls if not call.died()]
    assert [result[0] for result in results] == [8, 8]
    assert results[0][1] == results[1][1], "the members hold different state"
    assert sorted(failures for _, _, failures in results) == [[], [(7, True)]]
    assert time.monotonic() - began < PATIENCE / 2, "somebody waited for a third member"


def test_collective_that_fails_in_all_updates_loses_the_state(ranks, world):
    world.run(come, ranks.address(), 3)
    calls = world.start_all(train_with, "clip by all", 8)
    told = [call.error("StateLostError") for call in calls if not call.died()]
    assert len(told) == 2 and all("did not end" in error.text for error in told)


def test_a_frozen_member_is_left_out_and_told_so(ranks, world):
    world.run(come, ranks.address(), 3)
    calls = world.start_all(train, 300, 0.005)
    world.side(0, wait_for_steps, 10)
    world.freeze(2)
    assert world.side(0, wait_for_smaller_world) == 2
    world.thaw(2)
    calls[2].error("LeftOutError")
    results = [calls[rank].value() for rank in (0, 1)]
    assert results[0] == results[1]


def wait_for_smaller_world() -> int:
    wait_until(lambda: committed[-1][1] < 3, "a world of two")
    return committed[-1][1]


def test_new_groups_and_objects_after_the_stores_host_died(ranks, world):
    world.run(come, ranks.address(), 3)
    assert world.run(sum_over_members) == [6.0] * 3
    world.kill(0)
    rest = World(ranks, world.workers[1:])
    assert rest.run(after_a_death) == [(3.0, [0, 1], 3.0)] * 2


def after_a_death() -> tuple[float, list[int], float]:
    job = jobs[0]
    assert failure_of(lambda: dist.all_reduce(torch.ones(1))) is not None
    view = job.recover()
    group = dist.new_group(list(range(view.size)))
    tensor = torch.tensor([view.rank + 1.0])
    dist.all_reduce(tensor, group=group)
    objects: list[int] = [-1] * view.size
    dist.all_gather_object(objects, view.rank)
    from_first = torch.tensor([view.rank + 3.0])
    dist.broadcast(from_first, src=0)
    torchft_ext.backend(group).abort()
    failure = failure_of(lambda: dist.all_reduce(tensor, group=group))
    assert "calls job.recover(); make this group anew in the next view" in str(failure)
    return tensor.item(), objects, from_first.item()


def test_what_torch_builds_on_groups_works_with_a_newcomer(ranks, world, tmp_path):
    """After a death, and a newcomer that has seen no view before."""
    address = ranks.address()
    more = World(ranks, ranks.borrow(4))
    founders = World(ranks, more.workers[:3])
    founders.run(come, address, 3)
    founders.run(use_torch, str(tmp_path / "first"), 3)
    founders.kill(0)
    rest = World(ranks, more.workers[1:3])
    assert rest.run(use_torch, str(tmp_path / "second"), 2) == ["well"] * 2
    more.on(3, come, address, 3)
    calls = [more.start(rank, use_torch, str(tmp_path / "third"), 3) for rank in (1, 2, 3)]
    assert values_of(calls) == ["well"] * 3
    more.on(3, close)


def use_torch(folder: str, size: int) -> str:
    """Groups, a mesh, objects and a checkpoint, in the first view of that size."""
    job = jobs[0]
    view = job.recover()
    while view.size != size:
        view = job.recover()
    group = dist.new_group([size - 1, 0])
    if group != dist.GroupMember.NON_GROUP_MEMBER:
        total = torch.tensor([float(view.rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == size - 1
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    assert mesh.get_local_rank() == view.rank
    sharded = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    assert torch.equal(sharded.full_tensor(), torch.arange(6.0))
    objects = [f"of rank {view.rank}"]
    dist.broadcast_object_list(objects, src=size - 1)
    assert objects == [f"of rank {size - 1}"]
    dcp.save({"tensor": sharded}, checkpoint_id=folder)
    loaded = distribute_tensor(torch.zeros(6), mesh, [Shard(0)])
    dcp.load({"tensor": loaded}, checkpoint_id=folder)
    assert torch.equal(loaded.full_tensor(), torch.arange(6.0))
    return "well"


def test_who_does_not_come_is_waited_for_or_left_out(ranks, world):
    world.run(come, ranks.address(), 3)
    assert world.run(sum_over_members) == [6.0] * 3
    busy = world.start(2, be_busy, 6.0)
    told = world.on(0, error_of_recover)
    assert told.startswith("CommTimeoutError"), told
    assert "did not come" in told
    calls = [world.start(rank, recover_excluding, 3.0) for rank in (0, 1)]
    assert values_of(calls) == [2, 2]
    busy.value()
    assert world.on(2, error_of_recover).startswith("LeftOutError")


def be_busy(for_seconds: float) -> None:
    time.sleep(for_seconds)


def recover_excluding(limit: float) -> int:
    return jobs[0].recover(seconds(limit), patience=seconds(limit / 2)).size


def test_half_without_the_witness_is_no_quorum(ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = World(ranks, ranks.borrow(2))
    world.run(come, f"127.0.0.1:{store.port}/job", 2)
    assert world.run(sum_over_members) == [3.0] * 2
    del store
    world.kill(1)
    assert "recover()" in world.on(0, text_of_failed_reduce)
    told = world.on(0, error_of_recover)
    assert told.startswith("NoQuorumError")
    assert "its process ended" in told
    assert world.on(0, go_on_alone) == (1, True, 1.0, True)
    world.on(0, close)


def test_half_is_told_that_the_witness_does_not_answer(ranks):
    """Its host is cut off without a word: here it is stopped."""
    workers = World(ranks, ranks.borrow(3))
    world = World(ranks, workers.workers[:2])
    world.run(come, f"127.0.0.1:{workers.on(2, host_a_store)}/job", 2)
    assert world.run(sum_over_members) == [3.0] * 2
    workers.freeze(2)
    world.kill(1)
    told = world.on(0, error_of_recover)
    workers.thaw(2)
    assert told.startswith("NoQuorumError"), told
    assert "its process ended" in told and "the witness, did not answer" in told
    world.on(0, close)


stores: list[dist.TCPStore] = []


def host_a_store() -> int:
    stores[:] = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    return stores[0].port


@pytest.mark.parametrize("rule", ["members", "store"])
def test_who_goes_on_alone_takes_the_rest_in_anew(ranks, rule):
    workers = World(ranks, ranks.borrow(3))
    more = World(ranks, workers.workers[:2])
    address = ranks.address()
    more.run(come, address, 2, rule=rule)
    assert more.run(sum_over_members) == [3.0] * 2
    workers.kill(1)
    assert workers.on(0, go_on_alone) == (1, True, 1.0, True)
    workers.on(2, come, address, 2, rule=rule)
    newcomer = workers.start(2, train, 40)
    workers.on(0, wait_for_newcomer)
    results = values_of([workers.start(0, train, 40), newcomer])
    assert results[0] == results[1], "the members hold different state"
    assert workers.on(0, lineage) == workers.on(2, lineage)
    for rank in (0, 2):
        workers.on(rank, close)


def lineage() -> bytes:
    view = jobs[0].view()
    assert view is not None
    return view.lineage


def text_of_failed_reduce() -> str:
    error = failure_of(lambda: dist.all_reduce(torch.ones(1)))
    assert error is not None
    return error.text


def go_on_alone() -> tuple[int, bool, float, bool]:
    before = jobs[0].view()
    wait_errored()
    view = jobs[0].recover(without_quorum=True)
    assert before is not None
    released = view.phases["release"] > timedelta(0)
    return view.size, view.lineage != before.lineage, sum_over_members(), released


def error_of_recover() -> str:
    try:
        jobs[0].recover(seconds(2.0))
    except (elastic.ElasticError, torchft_ext.CommError) as error:
        return f"{type(error).__name__}: {error}"
    return "it went on"


def test_arguments_are_checked(ranks):
    with pytest.raises(ValueError, match="neither"):
        elastic.join(size=1)
    with pytest.raises(ValueError, match="key"):
        elastic.join(members=["127.0.0.1:1"], size=1)
    with pytest.raises(TypeError, match="members"):
        elastic.join(members="127.0.0.1:1", size=1)
    with pytest.raises(ValueError, match="rule"):
        elastic.join(members=["127.0.0.1:1"], size=1, key="k", rule="store")
    with pytest.raises(ValueError, match="rule"):
        elastic.join("127.0.0.1:1/job", size=1, rule="king")
    with pytest.raises(ValueError, match=r"elastic\.join: address: expected 'host:port/prefix'"):
        elastic.join("nowhere", size=1)
    with pytest.raises(ValueError, match=r"elastic\.join: members: expected 'host:port'"):
        elastic.join(members=["nowhere"], size=1, key="k")
    for listen, found in (("abc", "port"), (70000, "port"), ("[::1]:x", "'host:port'")):
        with pytest.raises(ValueError, match=rf"elastic\.join: listen: expected (a )?{found}"):
            elastic.join(members=["127.0.0.1:1"], size=1, key="k", listen=listen)
    with pytest.raises(ValueError, match="timeout: expected a positive time, found -1000 ms"):
        elastic.join("127.0.0.1:1/job", size=1, timeout=seconds(-1.0))
    with pytest.raises(ValueError, match="size: expected at most 65536"):
        elastic.join("127.0.0.1:1/job", size=65537)
    with pytest.raises(ValueError, match="min_size"):
        elastic.join(ranks.address(), size=2, min_size=3)
