"""What metrics() and the loggers of events tell of an elastic job."""

from __future__ import annotations

import logging

import torch
from elastic_side import come, gradient, members, net, recover, wait_for_newcomer
from exposition import Samples, parse, total
from ranks import World, values_of
from torch.nn.parallel import DistributedDataParallel as DDP

import torchft_ext
from torchft_ext import elastic

STEPS = 5
VOTED_DOWN = 2  # the number of the step that is tried twice

world = members(3)

heard: list[logging.LogRecord] = []


class Listener(logging.Handler):
    """Keeps what it hears."""

    def emit(self, record: logging.LogRecord) -> None:
        heard.append(record)


def listen() -> None:
    heard.clear()
    for name in ("torchft_quorums", "torchft_commits"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers[:] = [Listener()]
        logger.propagate = False


def records(name: str, *fields: str) -> list[tuple[object, ...]]:
    return [tuple(getattr(one, key) for key in fields) for one in heard if one.name == name]


def scraped() -> Samples:
    return parse(torchft_ext.metrics())


def grown(before: Samples, after: Samples, name: str, **labels: str) -> float:
    """A family whose series are not there yet counts nothing."""
    zero = {f"torchft_ext_{name}": {}}
    return total({**zero, **after}, name, **labels) - total({**zero, **before}, name, **labels)


def train(with_a_failure: bool) -> tuple[Samples, Samples]:
    """Counts before and after; with a failure this member ends the view once."""
    listen()
    before = scraped()
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    failed = not with_a_failure
    for step in elastic.steps(elastic.State(model, optimizer), total=STEPS):
        with step:
            if step.number == VOTED_DOWN and not failed:
                failed = True
                torchft_ext.backend().abort("of the test")
            gradient(model, step.number)
            step.commit(optimizer.step)
    return before, scraped()


def test_steps_are_counted_by_how_they_ended(ranks, world):
    pair = World(ranks, world.workers[:2])
    pair.run(come, ranks.address(), 2)
    calls = [pair.start(rank, train, rank == 0) for rank in range(2)]
    for aborts, (before, after) in zip([True, False], values_of(calls), strict=True):
        assert grown(before, after, "elastic_steps_committed_total") == STEPS
        # The other one may not have begun that step yet.
        assert int(aborts) <= grown(before, after, "elastic_steps_repeated_total") <= 1
        assert grown(before, after, "elastic_views_total") == 2
        assert grown(before, after, "elastic_agreements_total") >= STEPS
        assert grown(before, after, "elastic_recovery_seconds_total", phase="agree") > 0
        assert total(after, "elastic_step") == STEPS and total(after, "elastic_members") == 2
    found = pair.on(0, records, "torchft_commits", "step", "commit_result", "quorum_id", "rank")
    rank = found[0][3]
    tries = [(0, True, 1), (1, True, 1), (2, False, 1), (2, True, 2), (3, True, 2), (4, True, 2)]
    assert found == [(*one, rank) for one in tries]
    quorums = pair.on(0, records, "torchft_quorums", "quorum_id", "step", "size")
    assert quorums == [(1, 0, 2), (2, 2, 2)]


def recover_and_count() -> tuple[Samples, Samples]:
    before = scraped()
    recover()
    return before, scraped()


def test_lost_members_are_counted(ranks, world):
    world.run(come, ranks.address(), 3)
    for before, after in values_of(world.start_all(recover_and_count)):
        assert grown(before, after, "elastic_joined_total") == 3
        assert grown(before, after, "elastic_lost_total") == 0
    world.kill(2)
    for before, after in values_of([world.start(rank, recover_and_count) for rank in (0, 1)]):
        assert grown(before, after, "elastic_lost_total") == 1
        assert grown(before, after, "elastic_joined_total") == 0


def train_a_newcomer_in(steps: int) -> float:
    """Bytes of state that this member has seen sent."""
    before = scraped()
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in elastic.steps(elastic.State(model, optimizer), total=steps):
        with step:
            gradient(model, step.number)
            step.commit(optimizer.step)
            if step.number == 1 and step.view.size == 2:
                wait_for_newcomer()
    return grown(before, scraped(), "elastic_sync_bytes_total")


def test_bytes_of_a_sync_are_counted(ranks, world):
    address = ranks.address()
    pair = World(ranks, world.workers[:2])
    pair.run(come, address, 2)
    calls = pair.start_all(train_a_newcomer_in, 6)
    late = World(ranks, world.workers[2:])
    late.on(0, come, address, 2)
    calls += late.start_all(train_a_newcomer_in, 6)
    weights = 4 * sum(parameter.numel() for parameter in net().parameters())
    assert all(sent >= weights for sent in values_of(calls))
