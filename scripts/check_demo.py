#!/usr/bin/env python3
"""Runs the demonstration on a terminal, and looks at what somebody would see of it.

The live bar of both trainings, what happened, the hashes, the table of recoveries, the closing line
of JSON, and the picture.

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
WORLDS = [4, 3, 4]  # of both trainings, one after the other
ACTS = [
    "worker 4: admitted",
    "worker 1: killed",
    "worker 2: frozen",
    "worker 5: admitted",
    "worker 2: thawed",
    "worker 2: LeftOutError: ",
    "the store: killed",
    "worker 3: killed",
]
VIEW = re.compile(r"^  view \d+: workers ([\d ]+) go on with step \d+; state on all: (.*)$", re.M)
VIEWS = ["0123", "0123", "0234", "034", "0345", "0245"]  # the workers of each
TABLE = re.compile(
    r"^ms +heard +downtime +agree +connect +tables +sync +repeat\n((?:worker .*\n)+)\n", re.M
)
RECOVERIES = [
    "worker 1 is killed, worker 4 steps in",
    "worker 2 is frozen",
    "worker 5 joins",
    "worker 3 is killed, worker 2 comes back",
]
CHECKS = {
    "accuracy_within_one_point",
    "every_step_committed",
    "state_equal_after_every_change",
    "state_equal_at_the_end",
    "survivors_finished",
    "story_told_to_its_end",
}
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
    if worlds != WORLDS or outcome["world"] != WORLDS:
        found.append(f"expected worlds {WORLDS}, the bar: {worlds}, outcome: {outcome['world']}")
    for done, left, step, _ in shown:
        filled = BAR_LENGTH * int(step) // outcome["steps"]
        if (len(done), len(left)) != (filled, BAR_LENGTH - filled):
            found.append(f"the bar of step {step} is [{done}{left}]")
    return found


def troubles_with_acts(text: str) -> list[str]:
    places = [text.find(f"\n  {act}") for act in ACTS]
    if -1 in places or places != sorted(places):
        return [f"expected {ACTS} in this order, found them at {places}"]
    return []


def troubles_with_views(text: str) -> list[str]:
    """Who takes part, and that one hash is shown for all of them."""
    told = VIEW.findall(text)
    workers = ["".join(sorted(who.replace(" ", ""))) for who, _ in told]
    hashes = [state for _, state in told]
    if workers != VIEWS or not all(re.fullmatch(r"[0-9a-f]{12}", state) for state in hashes):
        return [f"expected views of {VIEWS} with one hash each, found {told}"]
    return []


def troubles_with_table(text: str) -> list[str]:
    """A row for each recovery: time to hear of it, but where somebody joins, and six figures."""
    found = TABLE.search(text)
    rows = found[1].splitlines() if found else []
    shown = [row for row in rows if re.search(r"\w +(?:\d+\.\d +)?(?:\d+\.\d +){5}\d+\.\d$", row)]
    if [re.split("  +", row)[0] for row in shown] != RECOVERIES:
        return [f"expected a table of {RECOVERIES}, found {rows}"]
    return []


def troubles_with_outcome(outcome: dict[str, Any]) -> list[str]:
    found = []
    if outcome["ok"] is not True or outcome["checks"] != dict.fromkeys(CHECKS, True):
        found.append(f"not all is well, or other things were looked at: {outcome['checks']}")
    recoveries = outcome["recoveries"]
    if [each["what"] for each in recoveries] != RECOVERIES:
        found.append(f"expected {RECOVERIES}, found {recoveries}")
    for each in recoveries:
        if not 0 < sum(each["phases_ms"].values()) <= each["downtime_ms"] + 1 < LIMIT_S * 1e3:
            found.append(f"these times do not fit together: {each}")
    for name in ("accuracy", "accuracy_without_faults"):
        if not 0 < outcome[name] <= 1:
            found.append(f"{name}: expected a share, found {outcome[name]}")
    return found


def troubles_with_picture(path: Path) -> list[str]:
    """A PNG with the lines of the acts, the curves, and the curve without a fault."""
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
        *troubles_with_acts(text),
        *troubles_with_views(text),
        *troubles_with_table(text),
        *troubles_with_outcome(outcome),
        *troubles_with_picture(PICTURE),
    ]
    print("\n".join(troubles) or "bar, hashes, table, JSON and picture are as they should be")
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
