"""Groups that members of an elastic job make for one view end with it, or hold its end up."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist
from elastic_side import come, is_waiting_in, jobs, members, recover, wait_for_threads
from ranks import Call, Pool, World, values_of
from rankside import PATIENCE, connected_store, failure_of, kept, seconds, wait_until

import torchft_ext
from torchft_ext.elastic import _view_groups

world = members(5)
held = threading.Event()  # in a worker: the groups are


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
    founders, at, waits = while_a_pair_is_made(ranks, world)
    third = founders.start(at.index(2), recover)
    kind, elapsed = waits.value()
    assert kind in ("CommAbortedError", "StoreLostError") and elapsed < PATIENCE / 2
    rest = [founders.start(at.index(rank), recover) for rank in (0, 1)]
    assert values_of([*rest, third]) == [0, 1, 2]


def test_making_of_a_group_ends_with_an_abort_of_a_member_that_is_not_in_it(ranks, world):
    """Nobody has asked for another view."""
    founders, at, waits = while_a_pair_is_made(ranks, world)
    founders.on(at.index(2), abort_job)
    kind, elapsed = waits.value()
    assert kind in ("CommAbortedError", "StoreLostError") and elapsed < PATIENCE / 2
    assert sorted(founders.run(recover)) == [0, 1, 2]


def while_a_pair_is_made(ranks: Pool, world: World) -> tuple[World, list[int], Call]:
    """Three founders, the rank of each in the view, and the call of member 0, which waits for
    member 1: that one never comes to the group. All of its members live."""
    founders = World(ranks, world.workers[:3])
    founders.run(come, ranks.address(), 3)
    at = founders.run(recover)
    keys = founders.on(at.index(1), keys_of_view)
    waits = founders.start(at.index(0), time_of_a_lost_pair)
    founders.on(at.index(1), wait_for_more_keys, keys)
    return founders, at, waits


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


def test_group_split_off_the_jobs_advises_to_make_it_anew(ranks, world):
    founders = World(ranks, world.workers[:2])
    founders.run(come, ranks.address(), 2)
    founders.run(recover)
    founders.run(split_off_a_child)
    for text in founders.run(advice_of_a_child):
        assert "; make this group anew in the next view" in text and "configure()" not in text, text


def split_off_a_child() -> None:
    kept["child"] = dist.group.WORLD.split_group([0, 1], group_name="child")


def advice_of_a_child() -> str:
    child = kept["child"]
    torchft_ext.backend(child).abort("the test says so")
    failure = failure_of(lambda: child.allreduce([torch.ones(1)]).wait())
    assert failure is not None
    return failure.text


def test_whole_group_ends_an_update_though_the_view_is_over(ranks, world):
    founders = World(ranks, world.workers[:3])
    founders.run(come, ranks.address(), 3)
    at = founders.run(recover)
    pair = [founders.start(at.index(rank), sum_in_a_pair_when_over) for rank in (0, 1)]
    for rank in (0, 1):
        founders.side(at.index(rank), wait_until_held)
    third = founders.start(at.index(2), recover)
    assert values_of(pair) == [(2.0, True)] * 2
    assert third.value() == 2


def wait_until_held() -> None:
    wait_for_threads("elastic-view")  # which ends the groups of a view that is over
    assert held.wait(PATIENCE)


def sum_in_a_pair_when_over() -> tuple[float, bool]:
    """In a group that was held, and whether it fails afterwards."""
    group = jobs[0].make_group("pair", [0, 1])
    tensor = torch.ones(1)
    with jobs[0].hold_groups():
        held.set()
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
    for gate in ("sent", "held"):  # groups that are not held end with the view
        founders.on(at.index(2), wait_for_gate, gates, gate)
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
        connected_store(gates).set("held", "")
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
