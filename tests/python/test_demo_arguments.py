"""The demonstration refuses what it cannot do before it trains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
REFUSED = {
    "--steps=3": "--steps must be at least 4, found 3",
    "--steps=0": "--steps must be at least 4, found 0",
    "--epochs=0": "--epochs must be at least 1, found 0",
    "--epochs=-1": "--epochs must be at least 1, found -1",
    "--world=7": "--world must be 2 to 6, found 7",
    "--kill-step=2": "--kill-step must be 3 to 219, found 2: DDP forms its buckets first",
    "--kill-step=220": "--kill-step must be 3 to 219, found 220: DDP forms its buckets first",
    "--output=/no/such/folder/demo.png": "--output must be a file that can be written, found "
    "'/no/such/folder/demo.png'",
    "--output=demo.txt": "--output must end in one of .png, .pdf, .svg, found 'demo.txt'",
}


@pytest.fixture
def demonstration(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_digits

    return train_digits


@pytest.mark.parametrize("option", REFUSED)
def test_demonstration_refuses_what_it_cannot_do(demonstration, monkeypatch, capsys, option):
    monkeypatch.setattr(sys, "argv", ["train_digits.py", option])
    with pytest.raises(SystemExit) as ended:
        demonstration.parse_arguments()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {REFUSED[option]}")


@pytest.mark.parametrize(("steps", "kill_step"), [(4, 3), (6, 3), (100, 50)])
def test_demonstration_chooses_when_one_dies(
    demonstration, monkeypatch, tmp_path, steps, kill_step
):
    options = [f"--steps={steps}", f"--output={tmp_path / 'demo.png'}"]
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *options])
    arguments = demonstration.parse_arguments()
    assert (arguments.steps, arguments.kill_step) == (steps, kill_step)
