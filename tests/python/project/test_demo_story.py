"""The demonstration's launcher: whatever happens to workers and store, the others train on."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits_launcher

    return digits_launcher


@pytest.fixture
def store(launcher):
    with launcher.Store() as store:
        yield store


def arguments_of(tmp_path: Path, world: int, steps: int) -> argparse.Namespace:
    return argparse.Namespace(
        world=world, steps=steps, pace=0.02, seed=1, output=tmp_path / "demo.png"
    )


def kill_by_hand(stage, worker: int) -> None:
    """As a visitor would: the launcher is not told."""
    os.kill(stage._workers[worker].process.pid, signal.SIGKILL)


def workers_of(recoveries) -> list[tuple[int, ...]]:
    return [each.workers for each in recoveries]


def test_the_whole_story_happens(launcher, store, tmp_path, capsys):
    import digits_picture
    import digits_report
    from digits_recoveries import recoveries_of

    arguments = arguments_of(tmp_path, world=4, steps=300)
    held = (launcher.SPARE, launcher.NEWCOMER)
    with launcher.Launcher(arguments, store, "the story", launcher.disturbed, held) as stage:
        run = stage.train()
    assert store.process.wait(10) == -signal.SIGKILL
    assert [event["worker"] for event in run.of("left out")] == [2]

    recoveries = list(recoveries_of(run))
    assert workers_of(recoveries) == [(0, 2, 3, 4), (0, 3, 4), (0, 3, 4, 5), (0, 2, 4, 5)]
    outcome = digits_report.evaluate(run, run, arguments)
    assert all(outcome["checks"].values()), outcome
    assert outcome["world"] == [4, 3, 4]
    digits_report.print_report(run, json.loads(json.dumps(outcome)))
    assert "\nworker 1 is killed, worker 4 steps in " in capsys.readouterr().out
    digits_picture.draw(run, run, arguments.output)
    assert arguments.output.stat().st_size > 0


def test_deaths_by_another_hand_are_survived_and_reported(launcher, store, tmp_path):
    from digits_recoveries import recoveries_of

    def deaths(stage):
        yield stage.world_is(3)
        kill_by_hand(stage, 1)
        yield stage.world_is(2)
        kill_by_hand(stage, 2)
        yield stage.world_is(1)  # the store is the voice that makes one of two a quorum

    arguments = arguments_of(tmp_path, world=3, steps=60)
    with launcher.Launcher(arguments, store, "a visitor", deaths) as stage:
        run = stage.train()
    assert run.told_whole
    assert [event["worker"] for event in run.of("killed")] == [1, 2]
    assert [event["worker"] for event in run.of("done")] == [0]
    what = [each.what for each in recoveries_of(run)]
    assert what == ["worker 1 is killed", "worker 2 is killed"]


def test_death_of_the_last_one_ends_the_demonstration(launcher, store, tmp_path):
    def death(stage):
        yield stage.world_is(1)
        kill_by_hand(stage, 0)

    arguments = arguments_of(tmp_path, world=1, steps=100)
    with (
        launcher.Launcher(arguments, store, "the last one", death) as stage,
        pytest.raises(launcher.DemoFailed, match="nobody is left"),
    ):
        stage.train()


def test_worker_with_an_error_of_its_own_ends_the_demonstration(launcher, store, tmp_path):
    class WithABadWorker(launcher.Launcher):
        def _command(self, arguments, number, held):
            return [*super()._command(arguments, number, held), *["--unknown"] * (number == 1)]

    with (
        WithABadWorker(arguments_of(tmp_path, world=2, steps=40), store, "a bad worker") as bad,
        pytest.raises(launcher.DemoFailed, match=r"worker 1 ended with 2\n(?s:.)*--unknown"),
    ):
        bad.train()
