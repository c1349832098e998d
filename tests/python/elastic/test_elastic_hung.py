"""A member whose program hangs is left out; the others go on, and lose nothing."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta

import elastic_side
import pytest
import torch
from elastic_side import jobs, members
from fake_job import LOST, FakeJob, a_job, a_state
from ranks import World, values_of
from rankside import PATIENCE, seconds, wait_until
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import torchft_ext
from torchft_ext import elastic
from torchft_ext.elastic._errors import ElasticTimeoutError, NoQuorumError, StateLostError
from torchft_ext.elastic._state import State
from torchft_ext.elastic._steps import steps
from torchft_ext.elastic._view import Answer

STEPS = 12
HANGS_AT = 4
HANGS_FOR = 14.0  # seconds, where nothing can release it; the others are done long before
STEP_TIMEOUT = 3.0  # a healthy member of a busy machine takes no longer,
LIMIT = 2.0  # nor this, to come to the next view

world = members(4)
job = pytest.fixture(a_job)
state = pytest.fixture(a_state)


# ---- where a program hangs


gates: list[tuple[int, int]] = []  # the ends of a pipe: nothing comes out before release()


def come(address: str, size: int, **options: object) -> None:
    gates[:] = [os.pipe()]
    elastic_side.come(address, size, **{"limit": seconds(LIMIT), **options})


def release() -> None:
    os.write(gates[0][1], b"x" * 9)


def wait_in_python() -> None:
    os.read(gates[0][0], 1)


def wait_in_c() -> None:
    ctypes.CDLL(None).read(gates[0][0], ctypes.create_string_buffer(1), 1)


def sleep_with_the_gil() -> None:
    ctypes.PyDLL(None).usleep(int(HANGS_FOR * 1e6))


class Hang(torch.autograd.Function):
    """An operation whose backward hangs when it is told to."""

    told = False

    @staticmethod
    def forward(ctx: object, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        if Hang.told:
            wait_in_python()
        return gradient


def hanging_loader(hangs: Callable[[], bool]) -> Iterator[torch.Tensor]:
    while True:
        if hangs():
            wait_in_python()
        yield torch.ones(2, 6)


IN_BLOCK = {"python": wait_in_python, "gil": sleep_with_the_gil, "c": wait_in_c}


def train(place: str, hang: bool, total: int = STEPS) -> tuple[int, str]:
    """Return how many steps were committed, and the state's digest."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters())
    state = State(model, optimizer)

    once = [True]

    def hangs_in(where: str) -> bool:
        return hang and place == where and state.step == HANGS_AT and bool(once) and once.pop()

    def update() -> None:
        if hangs_in("update"):
            wait_in_python()
        optimizer.step()

    batches = hanging_loader(lambda: hangs_in("loader"))
    for step in steps(state, total, step_timeout=seconds(STEP_TIMEOUT)):
        with step:
            for where, function in IN_BLOCK.items():
                if hangs_in(where):
                    function()
            outputs = model(Hang.apply(next(batches).requires_grad_()))
            Hang.told = hangs_in("backward")
            outputs.square().mean().backward()
            if hangs_in("vote"):
                wait_in_python()
            step.commit(update)
    return state.step, state.digest()


def check_that_the_others_go_on(ranks: object, world: World, place: str, hung: int) -> None:
    world.run(come, ranks.address(), 4)
    calls = [world.start(rank, train, place, rank >= 4 - hung) for rank in range(4)]
    results = values_of(calls[: 4 - hung])
    assert {result[0] for result in results} == {STEPS}
    assert len({digest for _, digest in results}) == 1
    for rank in range(4 - hung, 4):
        if place != "gil":
            world.side(rank, release)
        calls[rank].error("LeftOutError")


@pytest.mark.parametrize("place", [*IN_BLOCK, "backward", "vote", "update", "loader"])
def test_one_of_four_hangs(ranks, world, place):
    check_that_the_others_go_on(ranks, world, place, 1)


@pytest.mark.parametrize("place", ["python", "update"])
def test_two_of_four_hang(ranks, world, place):
    """The store's word makes the other half enough."""
    check_that_the_others_go_on(ranks, world, place, 2)


def test_members_that_are_too_few_wait_for_the_hung_one_and_name_it(ranks, world):
    few = World(ranks, world.workers[:2])
    few.run(come, ranks.address(), 2, min_size=2, timeout=seconds(9.0))
    calls = [few.start(rank, train, "python", rank == 1) for rank in range(2)]
    error = calls[0].error("CommTimeoutError")
    assert re.search(r"rank \d .*(did not come|sent no roster)", error.text), error.text
    few.side(1, release)
    calls[1].outcome()


def test_hang_that_ends_in_time_costs_a_step(ranks, world):
    """Who comes back within the limit is in the next view."""
    world.run(come, ranks.address(), 4, limit=seconds(PATIENCE / 2))
    calls = [world.start(rank, train, "python", rank == 3) for rank in range(4)]
    for rank in range(3):
        world.side(rank, wait_for_the_end_of_the_view)
    world.side(3, release)
    results = values_of(calls)
    assert len(set(results)) == 1 and results[0][0] == STEPS
    assert world.on(0, size_of_view) == 4


def wait_for_the_end_of_the_view() -> None:
    wait_until(lambda: jobs[0].is_over(), "the end of the view")


def size_of_view() -> int:
    return jobs[0].view().size


# ---- what steps() asks of a job


def test_after_a_wait_in_vain_only_the_limit_is_waited_for_the_absent(job, state):
    late = torchft_ext.CommTimeoutError("allreduce: timed out")
    failures = [late, torchft_ext.PeerLostError("allreduce: rank 1 is lost")]
    for step in steps(state, 1, job=job, step_timeout=timedelta(seconds=3)):
        with step:
            if failures:
                job.fail(failures.pop(0))
            step.commit()
    assert job.patience == [None, job.limit, timedelta(seconds=3)]


def test_agreement_that_runs_out_of_time_ends_the_view(job, state):
    late = ElasticTimeoutError("no word by the deadline of b")
    job.answers = [late, late, Answer(True)]
    assert commits(state, job) == [False, True]
    assert "abort step 0: no word by the deadline of b" in job.events
    assert job.patience[1] == job.limit


def commits(state: State, job: FakeJob) -> list[bool]:
    """Of each try."""
    said = []
    for step in steps(state, 1, job=job):
        with step:
            step.commit()
        said.append(step.committed)
    return said


def test_step_counts_where_the_next_view_says_so(job, state):
    """The late member has voted after all, and some member may have been told ok."""
    job.answers = [ElasticTimeoutError("no word by the deadline of b"), Answer(True)]
    assert commits(state, job) == [True]
    assert "abort step 0: no word by the deadline of b" in job.events


def test_half_that_waits_for_the_store_goes_on_to_recover(job, state):
    cut = NoQuorumError("half of its members are there")
    job.answers = [cut, cut, Answer(True)]
    assert commits(state, job) == [False, True]


def test_time_of_a_step_is_less_than_the_jobs(job, state):
    failures = [LOST]
    for step in steps(state, 1, job=job):
        with step:
            if failures:
                job.fail(failures.pop())
            step.commit()
    assert job.patience == [None, 0.8 * job.timeout]  # to the first view members may come late


@pytest.mark.parametrize("limit", [timedelta(0), timedelta(seconds=-1)])
def test_time_of_a_step_is_positive(job, state, limit):
    with pytest.raises(ValueError, match="step_timeout"):
        next(steps(state, 1, job=job, step_timeout=limit))


def test_member_says_that_it_holds_the_state(job, state):
    failures = [LOST]
    for step in steps(state, 1, job=job):
        with step:
            if failures:
                job.fail(failures.pop())
            step.commit()
    assert job.shards == [None, 0, 0, 0]  # before the first view it has none


def test_member_with_a_half_done_update_says_that_it_holds_nothing(job, state):
    with pytest.raises(StateLostError):  # there is no other one
        for step in steps(state, 2, job=job):
            with step:
                step.commit(job.fail)
    assert job.shards == [None, 0, None]


def test_waits_of_groups_are_bounded_while_steps_run(ranks, world):
    few = World(ranks, world.workers[:1])
    few.run(come, ranks.address(), 1)
    assert few.on(0, timeouts_in_steps) == (STEP_TIMEOUT, True)


def timeouts_in_steps() -> tuple[float, bool]:
    backend = torchft_ext.backend()
    before = backend.options._timeout
    model = nn.Linear(2, 2)
    for step in elastic.steps(State(model), 1, step_timeout=seconds(STEP_TIMEOUT)):
        with step:
            within = backend.options._timeout.total_seconds()
            step.commit()
    return within, backend.options._timeout == before
