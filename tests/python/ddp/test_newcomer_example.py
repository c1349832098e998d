"""The program on the page of how a newcomer joins does what the page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "newcomer.py"


def test_newcomer_trains_on_with_the_weights_of_all_members():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 members, sums of weights ")
    assert done.stderr == ""
