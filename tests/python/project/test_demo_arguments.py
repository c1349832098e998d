"""The demonstration refuses what it cannot do before it trains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
REFUSED = {
    "--steps=39": "--steps must be at least 40, found 39",
    "--steps=0": "--steps must be at least 40, found 0",
    "--pace=-0.1": "--pace must be 0 to 1, found -0.1",
    "--pace=1.5": "--pace must be 0 to 1, found 1.5",
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


def test_demonstration_takes_the_fewest_steps(demonstration, monkeypatch, tmp_path):
    options = ["--steps=40", f"--output={tmp_path / 'demo.png'}"]
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *options])
    assert demonstration.parse_arguments().steps == 40
