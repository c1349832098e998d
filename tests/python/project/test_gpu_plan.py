"""The plan for a machine with a GPU (tests/gpu/run.sh) fits its time and reports what was found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tests" / "gpu"))

import plan  # noqa: E402


@pytest.mark.parametrize("device", ("cuda", "privateuseone"))
def test_budgets_fit_in_ten_minutes_and_every_file_is_there(device):
    steps = plan.steps(device)
    assert plan.longest(steps) <= plan.WHOLE < 600
    for step in steps:
        for word in step.command:
            assert not word.endswith((".py", ".sh")) or (ROOT / word).is_file(), word


def test_list_prints_every_step_and_runs_nothing(tmp_path):
    command = [ROOT / "tests/gpu/run.sh", "--list", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for step in plan.steps("cuda"):
        assert step.optional or step.name in done.stdout
    assert not (tmp_path / "out").exists()


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def run(steps: list[plan.Step], folder: Path) -> list[plan.Result]:
    report = plan.Report(folder, "privateuseone")
    env = plan.common_environment("privateuseone", report.records, with_cpp=False)
    plan.run_all(steps, env, report)
    report.print_table()
    return report.results


def test_step_that_fails_or_hangs_does_not_stop_the_next(tmp_path, capsys):
    pause = "import signal; signal.pause()"
    hang = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{pause}'])"
    steps = [
        plan.Step("fails", 50, python("raise SystemExit(3)")),
        plan.Step("is not there", 50, ["no-such-program"], needs="no-such-program"),
        plan.Step("the last", 50, python("print('machine: {\"cores\": 2}')")),
    ]
    results = run(steps, tmp_path)
    assert [result.result for result in results] == ["FAILED", "skipped", "passed"]
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["machine"] == {"cores": 2} and written["measurement"] is False
    assert written["steps"][0]["detail"] == "status 3"
    assert "nothing else" in capsys.readouterr().out
    late = plan.run_step(plan.Step("hangs", 1, python(hang)), 0.5, {}, tmp_path)
    assert late.result == "too long" and late.seconds < 20


def test_unused_time_of_a_step_goes_to_the_next(tmp_path, capsys):
    slow = plan.Step("slow", 1, python("import time; time.sleep(1.5)"))
    quick = plan.Step("quick", 40, python("pass"))
    assert [result.result for result in run([quick, slow], tmp_path)] == ["passed", "passed"]


def waits_for(mine: Path, other: Path) -> list[str]:
    text = "import pathlib, time\npathlib.Path({!r}).touch()\n"
    text += "while not pathlib.Path({!r}).exists(): time.sleep(0.01)"
    return python(text.format(str(mine), str(other)))


def test_lanes_run_side_by_side_and_phases_one_after_the_other(tmp_path, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    last = python(f"import pathlib; assert pathlib.Path({str(there)!r}).exists()")
    steps = [
        plan.Step("last", 50, last, phase=1),
        plan.Step("one", 50, waits_for(here, there), phase=0),
        plan.Step("two", 50, waits_for(there, here), phase=0, lane=1),
    ]
    results = run(steps, tmp_path / "out")
    assert [result.result for result in results] == ["passed"] * 3
    assert results[-1].name == "last"
    log = (tmp_path / "out" / "log.txt").read_text()
    assert all(f"== {step.name}:" in log for step in steps)


SUITE = """
def test_good(): pass
def test_bad(): assert False
"""


def test_failed_tests_are_named_and_skips_are_failures(tmp_path, capsys):
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", str(suite)]
    (bad,) = run([plan.Step("suite", 50, command)], tmp_path)
    assert bad.failed == ["test_bad"] and bad.counts == {"passed": 1, "failed": 1, "skipped": 0}
    suite.write_text("import pytest\ndef test_no(): pytest.skip('no GPU')\n")
    (skipped,) = run([plan.Step("suite", 50, command)], tmp_path)
    assert skipped.result == "FAILED" and "1 tests were skipped" in skipped.detail
