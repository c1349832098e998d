"""An exception that ends one member after the other in the same step ends the job on all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from elastic_side import close, come, gradient, members, net
from fake_job import ME, a_job, a_state
from ranks import World
from torch.nn.parallel import DistributedDataParallel as DDP

from torchft_ext import elastic
from torchft_ext.elastic._errors import RepeatedError
from torchft_ext.elastic._repeats import Raised, Repeats
from torchft_ext.elastic._steps import steps
from torchft_ext.elastic._view import View
from torchft_ext.errors import Cause, CommAbortedError, CommError

job = pytest.fixture(a_job)
state = pytest.fixture(a_state)
world = members(4)

FULL = Raised(3, "OSError", "[Errno 28] No space left on device: '/data'")
ALL = ("aa", "bb", "cc", "dd")


def view_of(*names: str) -> View:
    return View(1, b"", 0, len(names), 0, names, True, (True,) * len(names))


def aborted_by(rank: int, raised: Raised) -> CommError:
    return CommAbortedError("of a test", cause=Cause(rank=rank, how=raised.reason()))


class FakeWire:
    """Of a view whose members know this."""

    def __init__(self, others: Sequence[Repeats]) -> None:
        self._others = others

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, *(other._pack() for other in self._others)]


def known(*seen: tuple[int, Raised]) -> Repeats:
    repeats = Repeats()
    for rank, raised in seen:
        repeats.note(aborted_by(rank, raised), view_of(*ALL))
    return repeats


def compare(repeats: Repeats, *others: Repeats) -> None:
    repeats.compare(FakeWire(others))  # type: ignore[arg-type]


def test_first_member_ends_alone():
    compare(known((0, FULL)), known((0, FULL)), known())


def test_second_one_ends_the_job_whoever_has_seen_which():
    for mine, theirs in [((0,), (1,)), ((), (0, 1)), ((0, 1), ())]:
        ours = known(*((rank, FULL) for rank in mine))
        with pytest.raises(RepeatedError, match=r"No space left on device.*ended 2 members"):
            compare(ours, known(*((rank, FULL) for rank in theirs)))


def test_what_it_says_may_differ():
    with pytest.raises(RepeatedError):
        compare(known((0, FULL)), known((1, Raised(3, "OSError", "of another file"))))


@pytest.mark.parametrize("other", [Raised(3, "ValueError", ""), Raised(4, "OSError", "")])
def test_another_class_or_step_is_another_exception(other):
    compare(known((0, FULL)), known((1, other)))


def test_an_earlier_step_is_forgotten():
    repeats = known((0, FULL), (1, Raised(4, "OSError", "")))
    compare(repeats, known((2, FULL)))


def test_failures_of_another_kind_are_none():
    repeats = known()
    for how in ("its process ended", "step 3: it ended by KeyboardInterrupt: ", "view 2: x: y"):
        repeats.note(CommError("", cause=Cause(rank=1, how=how)), view_of(*ALL))
    assert repeats._raised is None


def test_long_and_odd_texts_pass():
    odd = Raised(3, "E" * 100, "é\n" * 300)
    assert Raised.told_by(odd.reason()) == odd
    with pytest.raises(RepeatedError, match="E" * 64):
        compare(known(), known((0, odd), (1, odd)))


def test_loop_raises_it(job, state):
    job.members = [(ME, "bb", "cc", "dd"), (ME, "cc", "dd"), (ME, "dd")]
    tries = []
    with pytest.raises(RepeatedError, match="step 0: OSError: full"):
        for step in steps(state, 5, job=job):
            with step:
                tries.append(step.view.size)
                job.fail(aborted_by(1, Raised(0, "OSError", "full")))
    assert tries == [4, 3]


def test_exception_is_told_so_that_others_know_it(job, state):
    with pytest.raises(OSError, match="full"), next(steps(state, 5, job=job)):
        raise OSError("full")
    assert job.events[-1] == "abort step 0: OSError: full"
    with pytest.raises(KeyboardInterrupt), next(steps(state, 5, job=job)):
        raise KeyboardInterrupt
    assert Raised.told_by(job.events[-1].removeprefix("abort ")) is None


# ---------------------------------------------------------------- real members


def train_with_a_full_disk(at: int) -> tuple[str, str]:
    """How it ended here: rank 0 writes in the block of one step."""
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = elastic.State(model, optimizer)
    try:
        for step in elastic.steps(state, 1000):
            with step:
                gradient(model, step.number)
                if step.number == at and step.rank == 0:
                    raise OSError(28, "No space left on device")
                step.commit(optimizer.step)
    except (OSError, elastic.ElasticError) as error:
        close()
        return type(error).__name__, str(error)
    return "", ""


def test_full_disk_ends_two_members_and_then_the_job(ranks, world: World):
    address = ranks.address()
    world.run(come, address, 4)
    ends = world.run(train_with_a_full_disk, 10)
    assert sorted(kind for kind, _ in ends) == ["OSError"] * 2 + ["RepeatedError"] * 2
    for kind, text in ends:
        if kind == "RepeatedError":
            assert text.startswith("step 10: OSError: [Errno 28] No space left on device")
