"""What the demonstration says of a training, from events that a test made up."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
WORKERS = (0, 1, 2)
PHASES = {"agree": 0.001, "connect": 0.002, "tables": 0.003, "sync": 0.004}


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch):
    """Of the modules, what is looked at here."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from digits_launcher import Run
    from digits_recoveries import recoveries_of
    from digits_report import evaluate

    return Namespace(Run=Run, recoveries_of=recoveries_of, evaluate=evaluate)


def views_told(view: int, workers, step: int, time: float) -> list[dict]:
    return [
        {
            "event": "view",
            "worker": worker,
            "time": time,
            "view": view,
            "world": len(workers),
            "continuing": view > 1,
            "step": step,
            "digest": f"state before step {step}",
            "phases": PHASES,
        }
        for worker in workers
    ]


def steps_told(view: int, workers, step: int, time: float) -> list[dict]:
    told = {"event": "step", "time": time, "view": view, "step": step, "world": len(workers)}
    return [{**told, "worker": worker, "loss": 0.5} for worker in workers]


def done_told(workers, accuracy: float) -> list[dict]:
    told = {"event": "done", "time": 9.0, "accuracy": accuracy, "digest": "the end"}
    return [{**told, "worker": worker} for worker in workers]


def a_run(demo):
    """Of three, worker 1 is killed in the second of three steps."""
    left = (0, 2)
    events = [
        *views_told(1, WORKERS, 1, 0.0),
        *steps_told(1, WORKERS, 1, 1.0),
        {"event": "killed", "worker": 1, "time": 2.0},
        *({"event": "error", "worker": worker, "time": 2.001 + worker / 1e3} for worker in left),
        *views_told(2, left, 2, 2.013),
        *steps_told(2, left, 2, 2.02),
        *steps_told(2, left, 3, 3.0),
        *done_told(left, accuracy=0.955),
    ]
    return demo.Run("a run", events, told_whole=True)


def checks_that_fail(demo, run) -> list[str]:
    calm = demo.Run("calm", done_told(WORKERS, accuracy=0.96))
    checks = demo.evaluate(calm, run, Namespace(steps=3))["checks"]
    return [name for name, passed in checks.items() if not passed]


def test_recovery_has_its_phases_and_its_length(demo):
    (recovery,) = demo.recoveries_of(a_run(demo))
    assert (recovery.what, recovery.view, recovery.workers) == ("worker 1 is killed", 2, (0, 2))
    assert (recovery.heard, recovery.downtime) == (3.0, 20.0)
    assert recovery.phases == {"agree": 1, "connect": 2, "tables": 3, "sync": 4, "repeat": 7}


def test_run_as_it_should_be_passes_all_checks(demo):
    assert checks_that_fail(demo, a_run(demo)) == []


def worse_accuracy(events: list[dict]) -> None:
    for event in events:
        event.update({"accuracy": 0.94} if event["event"] == "done" else {})


def lost_step(events: list[dict]) -> None:
    events[:] = [event for event in events if event.get("step") != 3]


def other_state_after_change(events: list[dict]) -> None:
    next(event for event in events if event.get("view") == 2)["digest"] = "another state"


def member_that_is_silent(events: list[dict]) -> None:
    events.remove(next(event for event in events if event.get("view") == 2))


def other_state_at_the_end(events: list[dict]) -> None:
    events[-1]["digest"] = "another end"


def survivor_that_does_not_finish(events: list[dict]) -> None:
    events.pop()


@pytest.mark.parametrize(
    ("spoil", "check"),
    [
        (worse_accuracy, "accuracy_within_one_point"),
        (lost_step, "every_step_committed"),
        (other_state_after_change, "state_equal_after_every_change"),
        (member_that_is_silent, "state_equal_after_every_change"),
        (other_state_at_the_end, "state_equal_at_the_end"),
        (survivor_that_does_not_finish, "survivors_finished"),
    ],
)
def test_spoilt_run_fails_its_check(demo, spoil, check):
    run = a_run(demo)
    spoil(run.events)
    assert checks_that_fail(demo, run) == [check]


def test_story_that_did_not_end_fails_its_check(demo):
    run = a_run(demo)
    run.told_whole = False
    assert checks_that_fail(demo, run) == ["story_told_to_its_end"]
