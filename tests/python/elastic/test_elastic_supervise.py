"""run(supervise=True): the parent starts its child again, and the child ends where it hangs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from elastic_side import come, jobs, members
from rankside import PATIENCE, failure_of, seconds, wait_until

from torchft_ext.elastic import Exit, _run_command, _supervise
from torchft_ext.elastic._supervise import Pulse, Supervisor

world = members(2)

# Its first argument is a file, to which each run appends a line; the others are what the runs do.
CHILD = """
import os, signal, sys, time
path, *ends = sys.argv[1:]
with open(path, "a") as file:
    file.write("run\\n")
with open(path) as file:
    end = ends[len(file.readlines()) - 1]
pipe = int(os.environ["TORCHFT_EXT_SUPERVISED"])
if end == "waits":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    os.write(pipe, b".")
    with open(path + ".waits", "w"):
        pass
    while True:
        os.write(pipe, b".")
        time.sleep(0.05)
elif end == "stands still":
    os.write(pipe, b".")
    os.kill(os.getpid(), signal.SIGSTOP)
elif end == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(end))
"""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(_supervise, "_FIRST_PAUSE_S", 0.01)


def supervisor(path: Path, *ends: str, silence: float = 60.0) -> Supervisor:
    command = [sys.executable, "-c", CHILD, str(path), *ends]
    return Supervisor(command, timedelta(seconds=silence))


@pytest.mark.parametrize("last", [0, 2, 75, 80, 84])
def test_child_is_started_again_until_its_end_is_final(tmp_path, last):
    path = tmp_path / "runs"
    assert supervisor(path, "1", "is killed", "70", "69", str(last)).until_end() == last
    assert len(path.read_text().splitlines()) == 5


def test_child_that_stands_still_is_killed_and_started_again(tmp_path):
    path = tmp_path / "runs"
    assert supervisor(path, "stands still", "0", silence=0.3).until_end() == 0
    assert len(path.read_text().splitlines()) == 2


def test_word_to_leave_is_passed_on_and_ends_both(tmp_path):
    path = tmp_path / "runs"
    parent = supervisor(path, "waits", "0")
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(parent.until_end()))
    thread.start()
    wait_until(Path(f"{path}.waits").exists, "the child")
    parent.tell()
    thread.join()
    assert codes == [Exit.LEFT] and len(path.read_text().splitlines()) == 1


def test_program_that_does_not_come_back_is_ended_with_its_stacks(capfd):
    reading, writing = os.pipe()
    away = [0.0, 0.5, 1.5]
    ends: list[int] = []
    orphaned: list[bool] = []

    def hangs_for() -> float:
        return away.pop(0)

    pulse = Pulse(
        writing, hangs_for, timedelta(seconds=1), lambda: orphaned.append(True), ends.append
    )
    for _ in range(3):
        assert not ends
        pulse._end_if_hung()
    assert ends == [Exit.HUNG] and "test_program_that_does_not_come_back" in capfd.readouterr().err
    assert pulse._write() and os.read(reading, 9) == b"."
    os.close(reading)
    assert not pulse._write() and orphaned == [True]
    os.close(writing)


def test_job_knows_for_how_long_its_program_has_been_away(ranks, world):
    world.run(come, ranks.address(), 2)
    assert world.run(size_of_next_view) == [2, 2]
    away = world.start(1, stay_away)
    assert world.on(0, size_without_the_other) == 1
    world.side(1, wait_until_away)
    assert away.value() == "LeftOutError"
    assert world.on(1, away_for) == 0.0


back = threading.Event()


def size_of_next_view() -> int:
    return jobs[0].recover().size


def size_without_the_other() -> int:
    jobs[0].abort("the test goes on without the other one")
    return jobs[0].recover(patience=seconds(0.5)).size


def stay_away() -> str:
    """As a program that hangs; it comes back in the end."""
    back.clear()
    assert back.wait(PATIENCE)
    error = failure_of(lambda: jobs[0].recover())
    assert error is not None
    return error.type


def wait_until_away() -> None:
    wait_until(lambda: jobs[0].away_for() > 0, "the program to be missed")
    back.set()


def away_for() -> float:
    jobs[0].close()
    return jobs[0].away_for()


def test_supervised_command_runs_its_own_command_line_again(monkeypatch, tmp_path):
    """The child ends at once, since its store is missing: here as often as it may."""
    started: list[list[str]] = []

    def run_once(self: Supervisor) -> int:
        started.append(self._command)
        return Exit.UNAVAILABLE if len(started) < 3 else Exit.NO_QUORUM

    monkeypatch.setattr(Supervisor, "_run_once", run_once)
    before = signal.getsignal(signal.SIGTERM)
    code = _run_command.main(["--size=1", "--supervise", "127.0.0.1:9/job", "none.py"])
    assert code == Exit.NO_QUORUM
    assert started == [[sys.executable, *sys.orig_argv[1:]]] * 3
    assert signal.getsignal(signal.SIGTERM) is before
