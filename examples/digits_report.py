"""What the demonstration shows: progress, the table of recoveries, the verdict."""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from typing import TYPE_CHECKING, Any

from digits_recoveries import PHASES, recoveries_of, views_of

if TYPE_CHECKING:
    from digits_launcher import Run
    from digits_processes import Event

BAR = 30
PLAIN_LINES = 5  # per training, when stdout is not a terminal
LARGEST_ACCURACY_DIFFERENCE = 0.01


class Progress:
    """A live bar on a terminal, a few lines elsewhere."""

    def __init__(self, title: str, steps: int) -> None:
        self._steps = steps
        self._live = sys.stdout.isatty()
        self._on_bar = False  # the cursor stands at the end of the bar
        self._line(f"\n{title}")

    def step(self, step: int, loss: float, world: int) -> None:
        text = f"step {step:4d}/{self._steps}   world {world}   loss {loss:6.4f}"
        if self._live:
            filled = BAR * step // self._steps
            print(f"\r  [{'#' * filled}{'.' * (BAR - filled)}] {text} ", end="", flush=True)
            self._on_bar = True
        elif step == 1 or step % max(1, self._steps // PLAIN_LINES) == 0:
            self._line(f"  {text}")

    def happened(self, event: Event) -> None:
        """An act of the story, or an error of a worker."""
        who = "the store" if event["worker"] is None else f"worker {event['worker']}"
        what = str(event["event"]).removeprefix("store ")
        if "text" in event:  # up to its advice, which elastic.steps() follows by itself
            what = f"{event['kind']}: {event['text'].split(';')[0]}"
        self._line(f"  {who}: {what}")

    def view(self, told: list[Event]) -> None:
        """All members of a view have told of it."""
        who = " ".join(str(event["worker"]) for event in sorted(told, key=lambda e: e["rank"]))
        states = " ".join(sorted({event["digest"][:12] for event in told}))
        view, step = told[0]["view"], told[0]["step"]
        self._line(f"  view {view}: workers {who} go on with step {step}; state on all: {states}")

    def finish(self) -> None:
        if self._on_bar:
            self._line("")

    def _line(self, text: str) -> None:
        if self._on_bar and text:
            print()
        self._on_bar = False
        print(text, flush=True)


def evaluate(calm: Run, run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, and whether all is as it should be."""
    accuracies = [each.of("done")[0]["accuracy"] for each in (calm, run)]
    # From the first worker that told of each.
    worlds = {event["step"]: event["world"] for event in reversed(run.of("step"))}
    recoveries = [
        {
            "what": each.what,
            "view": each.view,
            "workers": each.workers,
            "heard_ms": each.heard,
            "downtime_ms": each.downtime,
            "phases_ms": each.phases,
        }
        for each in recoveries_of(run)
    ]
    checks = {
        "accuracy_within_one_point": abs(accuracies[1] - accuracies[0])
        <= LARGEST_ACCURACY_DIFFERENCE,
        "every_step_committed": sorted(worlds) == [*range(1, arguments.steps + 1)],
        "state_equal_after_every_change": state_is_equal(run),
        "state_equal_at_the_end": len({event["digest"] for event in run.of("done")}) == 1,
        "survivors_finished": survivors_finished(run),
        "story_told_to_its_end": run.told_whole,
    }
    return {
        "ok": all(checks.values()),
        "world": [world for world, _ in groupby(worlds[step] for step in sorted(worlds))],
        "steps": arguments.steps,
        "accuracy": round(accuracies[1], 4),
        "accuracy_without_faults": round(accuracies[0], 4),
        "recoveries": recoveries,
        "checks": checks,
    }


def state_is_equal(run: Run) -> bool:
    """Every member of each view told the same step and the same hash."""
    return all(
        len(told) == told[0]["world"] and len({(e["step"], e["digest"]) for e in told}) == 1
        for told in views_of(run).values()
    )


def survivors_finished(run: Run) -> bool:
    killed = {event["worker"] for event in run.of("killed")}
    trained = {event["worker"] for event in run.of("step")}
    return {event["worker"] for event in run.of("done")} == trained - killed


def print_report(run: Run, outcome: dict[str, Any]) -> None:
    recoveries = list(recoveries_of(run))
    width = max((len(each.what) for each in recoveries), default=0)
    titles = ("heard", "downtime", *PHASES)
    print(f"\n{'ms':{width}s}" + "".join(f"{title:>10s}" for title in titles))
    for each in recoveries:
        heard = "" if each.heard is None else f"{each.heard:.1f}"
        figures = (each.downtime, *each.phases.values())
        row = "".join(f"{figure:10.1f}" for figure in figures)
        print(f"{each.what:{width}s}{heard:>10s}{row}")
    print("\ntest accuracy")
    print(f"  {outcome['accuracy_without_faults']:12.2%}   without a fault")
    print(f"  {outcome['accuracy']:12.2%}   with all these faults")
    for check, passed in outcome["checks"].items():
        if not passed:
            print(f"NOT AS PROMISED: {check.replace('_', ' ')}")
