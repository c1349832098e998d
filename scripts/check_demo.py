#!/usr/bin/env python3
"""Runs the demonstration on a terminal, and looks at what somebody would see of it.

The live bar of both trainings, the table of the failure, the closing line of JSON, and the picture.

    python scripts/check_demo.py [COMMAND...]   default: make demo; writes demo.png here
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

LIMIT_S = 500.0
BAR_LENGTH = 30
BAR = re.compile(r"\r  \[(#*)(\.*)\] step +(\d+)/\d+   world (\d)   loss +\d+\.\d{4} (?=[\r\n])")
TABLE = "\nafter the kill   what happened\n"
TABLE_ROWS = 8
CHECKS = {
    "accuracy_within_one_point",
    "survivors_finished",
    "survivors_hold_the_same_model",
    "gradients_averaged_over_the_new_size",
}
TIMES = {"last_error_ms", "membership_published_ms", "last_configured_ms", "last_resumed_ms"}
PICTURE = Path("demo.png")


def on_a_terminal(command: list[str]) -> tuple[int, str]:
    """Run it in a session and on a terminal of its own: its exit status, and what it wrote."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        text = read_to_the_end(ours, time.monotonic() + LIMIT_S)
        return process.wait(30), text.replace("\r\n", "\n")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(ours)


def read_to_the_end(terminal: int, deadline: float) -> str:
    parts: list[bytes] = []
    while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            parts.append(os.read(terminal, 65536))
        except OSError:  # EIO: the last process has closed it
            return b"".join(parts).decode()
    sys.exit(b"".join(parts).decode() + f"\nnot finished after {LIMIT_S:g} s")


def troubles_with_bar(text: str, outcome: dict[str, Any]) -> list[str]:
    found, shown = [], BAR.findall(text)
    steps = [int(step) for _, _, step, _ in shown]
    if steps != [*range(1, outcome["steps"] + 1)] * 2:
        found.append(f"the bar shows other steps than 1 to {outcome['steps']}, twice: {steps}")
    worlds = [int(world) for world, _ in groupby(world for *_, world in shown)]
    if worlds != outcome["world"]:
        found.append(f"the bar shows worlds {worlds}, the outcome {outcome['world']}")
    for done, left, step, _ in shown:
        filled = BAR_LENGTH * int(step) // outcome["steps"]
        if (len(done), len(left)) != (filled, BAR_LENGTH - filled):
            found.append(f"the bar of step {step} is [{done}{left}]")
    return found


def troubles_with_table(text: str) -> list[str]:
    table = text.partition(TABLE)[2].partition("\n\n")[0]
    rows = re.findall(r"^ +(\d+\.\d) ms   \S.+$", table, re.M)
    times = [float(milliseconds) for milliseconds in rows]
    if len(times) != TABLE_ROWS or times[0] != 0 or times != sorted(times):
        return [f"expected a table of {TABLE_ROWS} rows, from 0.0 ms on, found:\n{table}"]
    return []


def troubles_with_outcome(outcome: dict[str, Any]) -> list[str]:
    found = []
    if outcome["ok"] is not True or outcome["checks"] != dict.fromkeys(CHECKS, True):
        found.append(f"not all is well, or other things were looked at: {outcome['checks']}")
    times = outcome["after_kill"]
    if times.keys() != TIMES or not all(0 < time < LIMIT_S * 1e3 for time in times.values()):
        found.append(f"expected {sorted(TIMES)}, found {times}")
    for name in ("accuracy", "accuracy_without_failure"):
        if not 0 < outcome[name] <= 1:
            found.append(f"{name}: expected a share, found {outcome[name]}")
    return found


def troubles_with_picture(path: Path) -> list[str]:
    """A PNG with the line of the kill, the curves, and the curve without a failure."""
    from matplotlib import image

    if not path.is_file() or not path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n"):
        return [f"{path}: no PNG"]
    pixels = image.imread(path)
    red, green, blue = (pixels[..., channel] for channel in range(3))
    coloured = {
        "red": (red > 0.8) & (green < 0.3) & (blue < 0.3),
        "blue": (red < 0.3) & (blue > 0.6),
        "grey": (abs(red - 0.7) < 0.02) & (red == green) & (green == blue),
    }
    return [f"{path}: nothing is {name}" for name, where in coloured.items() if where.sum() < 100]


def main() -> int:
    PICTURE.unlink(missing_ok=True)
    status, text = on_a_terminal(sys.argv[1:] or ["make", "demo"])
    print(text.replace("\r", "\n"))
    if status != 0:
        print(f"the demonstration ended with {status}")
        return 1
    try:
        outcome = json.loads(text.splitlines()[-1])
    except ValueError:
        print("its last line is no JSON")
        return 1
    troubles = [
        *troubles_with_bar(text, outcome),
        *troubles_with_table(text),
        *troubles_with_outcome(outcome),
        *troubles_with_picture(PICTURE),
    ]
    print("\n".join(troubles) or "bar, table, JSON and picture are as they should be")
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
