"""Errors have the words by which programs written for torch's own backends know them."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from rankside import ErrorInfo, abort, failure_of, seconds, wait_errored
from test_failures import blocking_all_reduce, blocking_barrier, sum_or_max
from torch.distributed import distributed_c10d as c10d

LIMIT = 0.2  # seconds

# Of which errors; what is looked for in their text; by whom.
CALLERS = [
    ("time", r" (Timed out|closed|timeout) ", "torch's distributed_test, of a barrier"),
    ("time", r"Timed out waiting 200ms", "the same, of a barrier's argument"),
    ("time", r"Timed out waiting", "torch's distributed_test in debug mode, and of gloo's errors"),
    ("time", r"timed out after|Timed out waiting", "torchft's tests of process groups"),
    ("time", r"timed out", "scripts that sort logs and retry"),
    ("time", r"timeout", "the same, and torch's tests of nccl"),
    ("time told", r"timed out", "scripts on ranks that ran into no limit themselves"),
    ("time told", r" timeout ", "torch's distributed_test"),
    ("lost", r"Connection closed by peer", "torchft's tests, scripts that sort logs"),
    ("lost", r" (Timed out|closed|timeout) ", "torch's distributed_test"),
    ("left", r"Connection closed by peer", "torchft's tests: a rank's shutdown()"),
    (
        "aborted",
        r"communicator was aborted",
        "torch's tests of nccl, loops around recv()",
    ),
    ("aborted", r"aborted", "torchft's tests, of errored()"),
    ("mismatch", r"(?i)mismatch", "torch's tests of its wrapper"),
]


def limited_barrier() -> ErrorInfo | None:
    options = c10d.BarrierOptions()  # barrier(timeout=) is newer than torch 2.11
    options.timeout = seconds(LIMIT)
    group = c10d._get_default_group()
    return failure_of(lambda: group.barrier(options).wait())


def limited_wait() -> ErrorInfo | None:
    return failure_of(lambda: dist.irecv(torch.ones(1), 1).wait(seconds(LIMIT)))


def errors_of_time(ranks) -> dict[str, list[ErrorInfo]]:
    world = ranks.world(2)
    errors = {"time": [world.on(0, limited_barrier)], "time told": [world.on(1, wait_errored)]}
    errors["time"].append(world.next().on(0, limited_wait))
    return errors


def errors_of_a_loss(ranks) -> dict[str, list[ErrorInfo]]:
    world = ranks.world(2)
    blocked = world.start_blocked(0, blocking_all_reduce)
    world.kill(1)
    lost = blocked.error("PeerLostError")
    world = ranks.world(2)
    blocked = world.start_blocked(0, blocking_barrier)
    assert world.workers[1].exit() == 0
    return {"lost": [lost], "left": [blocked.error("PeerLeftError")]}


def errors_of_an_end(ranks) -> dict[str, list[ErrorInfo]]:
    world = ranks.world(2)
    world.on(0, abort)
    aborted = [world.on(rank, wait_errored) for rank in (0, 1)]
    world = world.next()
    calls = [world.start(rank, sum_or_max, op) for rank, op in enumerate(("SUM", "MAX"))]
    return {"aborted": aborted, "mismatch": [call.error("MismatchError") for call in calls]}


@pytest.mark.parametrize("provoke", [errors_of_time, errors_of_a_loss, errors_of_an_end])
def test_errors_have_the_words_that_callers_look_for(ranks, provoke):
    for kind, errors in provoke(ranks).items():
        wanted = [(words, who) for of, words, who in CALLERS if of == kind]
        assert wanted
        for error in errors:
            for words, who in wanted:
                assert re.search(words, error.text), (kind, who, words, error.text)
