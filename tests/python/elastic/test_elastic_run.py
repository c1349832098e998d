"""python -m torchft_ext.elastic run: how launch end, as a launcher sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import Pool, Worker
from rankside import PATIENCE, leave_default_group, wait_until

from torchft_ext.elastic import Exit, _run_command

FULL = {"max-size": 1}
SCRIPT = Path(__file__).with_name("run_script.py")


def arguments(address: str, how: str, **options: object) -> list[str]:
    given = {"size": 1, "min-size": 1, "limit": 2, "timeout": PATIENCE, **options}
    return [*(f"--{name}={value}" for name, value in given.items()), address, str(SCRIPT), how]


def end_by_command(given: list[str]) -> None:
    """In a rank, which ends by it: its code is the process's."""
    leave_default_group()
    code = _run_command.main(given)
    sys.stdout.flush()
    os._exit(code)


class Launched:
    """A process that ends by the command."""

    def __init__(self, worker: Worker, given: list[str]) -> None:
        self._worker = worker
        self._begin = len(self._log())
        worker.call(end_by_command, [given], {})

    def _log(self) -> str:
        """Of a process that is still being started there is none."""
        return self._worker.log() if self._worker.log_path.exists() else ""

    def text(self) -> str:
        return self._log()[self._begin :]

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.text(), f"{text!r} in the log")

    def code(self) -> int:
        return self._worker.process.wait(PATIENCE)

    def kill(self) -> None:
        self._worker.kill()

    def terminate(self) -> None:
        os.kill(self._worker.pid, signal.SIGTERM)


Launch = Callable[..., Launched]


@pytest.fixture
def launch(ranks: Pool) -> Iterator[Launch]:
    borrowed: list[Worker] = []

    def start(address: str, how: str, **options: object) -> Launched:
        borrowed.extend(ranks.borrow(1, borrowed))
        return Launched(borrowed[-1], arguments(address, how, **options))

    yield start
    for worker in borrowed:
        worker.kill()


def test_command_ends_the_process_with_its_code(ranks, rank_env):
    command = [sys.executable, "-m", "torchft_ext.elastic", "run"]
    command += arguments(ranks.address(), "NoProgressError")
    done = subprocess.run(command, env=rank_env, capture_output=True, text=True, timeout=300)
    assert done.returncode == Exit.NO_PROGRESS, done.stderr
    assert done.stderr.endswith("torchft_ext.elastic run: exit code 83: NO_PROGRESS\n")


def test_job_that_ends_well_is_over_for_who_comes_later(ranks, launch):
    address = ranks.address()
    assert launch(address, "well").code() == Exit.OVER == 0
    late = launch(address, "well")
    assert late.code() == Exit.OVER
    assert "is over: it ended at" in late.text() and "by 1 member" in late.text()
    assert "joined" not in late.text()


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("an error", Exit.FAILED),
        ("exit 7", 7),
        ("exit 0", Exit.UNAVAILABLE),  # the job is not known to be over
        ("NoQuorumError", Exit.NO_QUORUM),
        ("StateLostError", Exit.STATE_LOST),
        ("DivergenceError", Exit.DIVERGED),
        ("NoProgressError", Exit.NO_PROGRESS),
        ("RepeatedError", Exit.REPEATED),
    ],
)
def test_error_has_a_code_of_its_own(ranks, launch, how, code):
    worker = launch(ranks.address(), how)
    assert worker.code() == code, worker.text()
    if code not in (Exit.FAILED, 7):
        assert f"exit code {int(code)}: {Exit(code).name}" in worker.text()


def test_without_a_store_it_is_unavailable(launch):
    worker = launch("127.0.0.1:9/job", "well", timeout=0.5)
    assert worker.code() == Exit.UNAVAILABLE, worker.text()


def test_who_is_started_again_after_the_loss_of_all_has_no_quorum(ranks, launch):
    address = ranks.address()
    founder = launch(address, "for ever")
    founder.wait_for("trains")
    founder.kill()
    again = launch(address, "for ever")
    assert again.code() == Exit.NO_QUORUM
    assert "none of its members runs any more: missing" in again.text()
    assert "Two ways out" in again.text()


def test_founder_that_waits_for_others_leaves_when_told(ranks, launch):
    address = ranks.address()
    founder = launch(address, "well", size=2)
    founder.wait_for("waits for its founders: 1 of 2 processes have come")
    assert_leaves_soon(founder)
    assert "joined" not in founder.text()
    first = launch(address, "well", size=2)  # the seat is free again
    second = launch(address, "well", size=2)
    assert [first.code(), second.code()] == [Exit.OVER] * 2, first.text() + second.text()


def test_spare_and_member_leave_when_told(ranks, launch):
    address = ranks.address()
    member = launch(address, "for ever", **FULL)
    member.wait_for("trains")
    spare = launch(address, "for ever", **FULL)
    member.wait_for("somebody waits")
    assert_leaves_soon(spare)
    assert_leaves_soon(member)


def test_spare_that_was_not_needed_is_over_with_the_job(ranks, launch):
    address = ranks.address()
    member = launch(address, "stops when somebody waits", **FULL)
    member.wait_for("trains")
    spare = launch(address, "for ever", **FULL)
    assert member.code() == Exit.OVER, member.text()
    assert spare.code() == Exit.OVER, spare.text()
    assert "trains" not in spare.text()


def assert_leaves_soon(worker: Launched) -> None:
    """Long before any of its waits would have run out of time."""
    began = time.monotonic()
    worker.terminate()
    assert worker.code() == Exit.LEFT, worker.text()
    assert time.monotonic() - began < PATIENCE / 4
