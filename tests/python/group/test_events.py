"""Events: records of Python's loggers for generations and failures."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from rankside import abort, failure_of, wait_errored
from values import check_sum

import torchft_ext

heard: list[logging.LogRecord] = []


class Listener(logging.Handler):
    """Keeps what it hears."""

    def emit(self, record: logging.LogRecord) -> None:
        heard.append(record)


def listen(name: str) -> None:
    heard.clear()
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    logger.handlers[:] = [Listener()]
    logger.propagate = False


def fields(*names: str) -> list[tuple[object, ...]]:
    return [tuple(getattr(record, name) for name in names) for record in heard]


def state() -> tuple[str, int]:
    return torchft_ext.backend().group_name, torchft_ext.backend().generation


def meet_the_failure_twice() -> None:
    for _ in range(2):
        assert failure_of(lambda: dist.all_reduce(torch.ones(1))) is not None


def test_failure_is_one_record_however_often_it_is_met(ranks):
    world = ranks.world(2)
    world.run(check_sum)
    world.on(0, listen, "torchft_errors")
    group, generation = world.on(0, state)
    world.on(0, abort, "for the record")
    world.on(0, wait_errored)
    world.on(0, meet_the_failure_twice)
    found = world.on(0, fields, "group", "quorum_id", "rank", "cause")
    assert found == [(group, generation, 0, "aborted")]
    assert "for the record" in world.on(0, fields, "error")[0][0]


def test_generation_is_one_record(ranks):
    world = ranks.world(2)
    world.on(0, listen, "torchft_ext.generations")
    world = world.next()
    group, generation = world.on(0, state)
    assert world.on(0, fields, "group", "quorum_id", "rank", "size") == [(group, generation, 0, 2)]
