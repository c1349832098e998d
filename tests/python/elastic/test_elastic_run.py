"""python -m torchft_ext.elastic run, as processes that a launcher starts: how each of them ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rankside import PATIENCE

from torchft_ext.elastic import Exit

SCRIPT = Path(__file__).with_name("run_script.py")


class Workers:
    """Processes of one test; what is left of them is killed after it."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._all: list[Worker] = []

    def start(self, address: str, how: str, **options: object) -> Worker:
        given = {"size": 1, "min-size": 1, "limit": 2, "timeout": PATIENCE, **options}
        command = [sys.executable, "-m", "torchft_ext.elastic", "run"]
        command += [f"--{name}={value}" for name, value in given.items()]
        worker = Worker([*command, address, str(SCRIPT), how], self._env)
        self._all.append(worker)
        return worker

    def close(self) -> None:
        for worker in self._all:
            worker.process.kill()
            worker.process.wait()


class Worker:
    """One of them, whose output is read as it comes."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, text: str) -> None:
        with self._news:
            found = self._news.wait_for(lambda: text in self.text(), PATIENCE)
        assert found, f"no {text!r} in {self.text()}"

    def text(self) -> str:
        return "".join(self.lines)

    def code(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@pytest.fixture
def workers(rank_env: dict[str, str]) -> Iterator[Workers]:
    made = Workers({**rank_env, "TORCHFT_EXT_LOG": "info"})
    yield made
    made.close()


def test_job_that_ends_well_is_over_for_who_comes_later(ranks, workers):
    address = ranks.address()
    assert workers.start(address, "well").code() == Exit.OVER == 0
    late = workers.start(address, "well")
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
def test_error_has_a_code_of_its_own(ranks, workers, how, code):
    worker = workers.start(ranks.address(), how)
    assert worker.code() == code, worker.text()
    if code not in (Exit.FAILED, 7):
        assert f"exit code {int(code)}: {Exit(code).name}" in worker.text()


def test_without_a_store_it_is_unavailable(workers):
    worker = workers.start("127.0.0.1:9/job", "well", timeout=0.5)
    assert worker.code() == Exit.UNAVAILABLE, worker.text()


def test_who_is_started_again_after_the_loss_of_all_has_no_quorum(ranks, workers):
    address = ranks.address()
    founder = workers.start(address, "for ever")
    founder.wait_for("trains")
    founder.process.kill()
    again = workers.start(address, "for ever")
    assert again.code() == Exit.NO_QUORUM
    assert "none of its members runs any more: missing" in again.text()
    assert "Two ways out" in again.text()


def test_founder_that_waits_for_others_leaves_when_told(ranks, workers):
    address = ranks.address()
    founder = workers.start(address, "well", size=2)
    ranks.await_key(address, "seat/0")
    assert_leaves_soon(founder)
    assert "joined" not in founder.text()
    first = workers.start(address, "well", size=2)  # the seat is free again
    second = workers.start(address, "well", size=2)
    assert [first.code(), second.code()] == [Exit.OVER] * 2, first.text() + second.text()


def test_spare_and_member_leave_when_told(ranks, workers):
    address = ranks.address()
    member = workers.start(address, "for ever", **{"max-size": 1})
    member.wait_for("trains")
    spare = workers.start(address, "for ever", **{"max-size": 1})
    member.wait_for("somebody waits")
    assert_leaves_soon(spare)
    assert_leaves_soon(member)


def test_spare_that_was_not_needed_is_over_with_the_job(ranks, workers):
    address = ranks.address()
    member = workers.start(address, "stops when somebody waits", **{"max-size": 1})
    member.wait_for("trains")
    spare = workers.start(address, "for ever", **{"max-size": 1})
    assert member.code() == Exit.OVER, member.text()
    assert spare.code() == Exit.OVER, spare.text()
    assert "trains" not in spare.text()


def assert_leaves_soon(worker: Worker) -> None:
    """Long before any of its waits would have run out of time."""
    began = time.monotonic()
    worker.terminate()
    assert worker.code() == Exit.LEFT, worker.text()
    assert time.monotonic() - began < PATIENCE / 4
