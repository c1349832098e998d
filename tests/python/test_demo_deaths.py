"""The demonstration's launcher: whoever is killed, by whomever, the others train on."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHOSEN, ANOTHER = 1, 2

# A worker that waits for its end after that step: the others stand in the next one until then.
WAITS = """
import signal, sys
sys.path.insert(0, {examples!r})
import train_digits

def report(step, *details):
    report_step(step, *details)
    while step >= {last}:
        signal.pause()

report_step, train_digits.report_step = train_digits.report_step, report
sys.exit(train_digits.main())
"""


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits_launcher

    return digits_launcher


def arguments_of(tmp_path: Path, world: int) -> argparse.Namespace:
    return argparse.Namespace(
        world=world, steps=12, kill_step=5, seed=1, output=tmp_path / "demo.png"
    )


def train(launcher, arguments, victim, kills_at):
    """Train; kill the worker that stands at a step in `kills_at` when it is done."""
    last_steps = {worker: step for step, worker in kills_at.items()}

    class Visited(launcher.Launcher):
        def _command(self, arguments, number):
            python, script, *options = super()._command(arguments, number)
            if number not in last_steps:
                return [python, script, *options]
            waits = WAITS.format(examples=str(EXAMPLES), last=last_steps[number])
            return [python, "-c", waits, *options]

        def _next_event(self, deadline):
            event = super()._next_event(deadline)
            if event["event"] == "step" and event["step"] in kills_at:
                os.kill(self._workers[kills_at[event["step"]]].process.pid, signal.SIGKILL)
            return event

    with Visited(arguments, victim, "a training with a visitor") as visited:
        return visited.train()


def test_second_death_is_survived_and_reported(launcher, tmp_path, capsys):
    import digits_report

    arguments = arguments_of(tmp_path, world=4)
    undisturbed = train(launcher, arguments, None, {})
    disturbed = train(launcher, arguments, CHOSEN, {8: ANOTHER})
    assert [event["worker"] for event in disturbed.of("killed")] == [CHOSEN, ANOTHER]
    assert sorted(event["worker"] for event in disturbed.of("done")) == [0, 3]
    assert {event["world"] for event in disturbed.of("step")} == {4, 3, 2}

    outcome = digits_report.evaluate(undisturbed, disturbed, arguments)
    assert outcome["world"] == [4, 3, 2]
    accuracy = outcome["checks"].pop("accuracy_within_one_point")  # twelve steps learn little
    assert isinstance(accuracy, bool)
    assert all(outcome["checks"].values()), outcome
    digits_report.print_report(disturbed, outcome)
    assert f"worker {CHOSEN} is killed in the middle of step 5\n" in capsys.readouterr().out
    digits_report.draw(undisturbed, disturbed, arguments.output)
    assert arguments.output.stat().st_size > 0


def test_death_of_all_but_one_is_survived(launcher, tmp_path):
    run = train(launcher, arguments_of(tmp_path, world=2), None, {4: CHOSEN})
    assert [event["worker"] for event in run.of("done")] == [0]
    assert [event["world"] for event in run.of("step")][-1] == 1


def test_death_of_the_last_one_ends_the_demonstration(launcher, tmp_path):
    arguments = arguments_of(tmp_path, world=2)
    with pytest.raises(launcher.DemoFailed, match="worker 0 ended with -9"):
        train(launcher, arguments, None, {4: CHOSEN, 8: 0})


def test_worker_with_an_error_of_its_own_ends_the_demonstration(launcher, tmp_path):
    class WithABadWorker(launcher.Launcher):
        def _command(self, arguments, number):
            return [*super()._command(arguments, number), *["--unknown"] * (number == CHOSEN)]

    with (
        WithABadWorker(arguments_of(tmp_path, world=2), None, "a bad worker") as bad,
        pytest.raises(launcher.DemoFailed, match=r"worker 1 ended with 2\n(?s:.)*--unknown"),
    ):
        bad.train()
