"""What the demonstration shows: progress, the table of the failure, the picture, the verdict."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from digits_launcher import Event, Run

BAR = 30
PLAIN_LINES = 5  # per training, when stdout is not a terminal
LARGEST_ACCURACY_DIFFERENCE = 0.01
LARGEST_GRADIENT_DIFFERENCE = 1e-4


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
        who = f"worker {event['worker']}"
        if event["event"] == "killed":
            self._line(f"  {who}: killed")
        elif event["event"] == "error":
            self._line(f"  {who}: {event['kind']}: {event['text'].splitlines()[0]}")
        else:
            self._line(f"  {who}: is rank {event['rank']} of {event['world']} now")

    def finish(self) -> None:
        if self._on_bar:
            self._line("")

    def _line(self, text: str) -> None:
        if self._on_bar and text:
            print()
        self._on_bar = False
        print(text, flush=True)


class FirstFailure:
    """What followed the first kill, in ms after it, until somebody killed yet another worker."""

    def __init__(self, run: Run) -> None:
        self.killed, *more = run.of("killed")
        self._end = more[0]["time"] if more else math.inf
        self._run = run

    def events(self, kind: str) -> list[Event]:
        return [event for event in self._run.of(kind) if event["time"] < self._end]

    def times(self, kind: str) -> list[float]:
        return sorted((event["time"] - self.killed["time"]) * 1e3 for event in self.events(kind))

    def last(self, kind: str) -> float:
        """NaN: the next kill came before."""
        return max(self.times(kind), default=math.nan)


def timeline(run: Run) -> list[tuple[float, str]]:
    """(ms after the kill, what happened), in order."""
    failure = FirstFailure(run)
    kinds = ", ".join(sorted({event["kind"] for event in failure.events("error")}))
    world = run.of("configured")[0]["world"]
    done = run.of("agreed")[0]["steps_done"]
    first_and_last = {
        "error": (
            f"the first survivor has its error ({kinds})",
            "the last survivor has its error",
        ),
        "configured": (
            f"the first survivor is in a group of {world}",
            f"the last survivor is in a group of {world}",
        ),
    }
    lasts = {
        "published": "the launcher has seen the death and says who is left",
        "agreed": "all hold the same parameters, buffers and optimizer state",
        "resumed": f"step {done + 1} is done on all survivors, gradients averaged over {world}",
    }
    rows = [(0.0, f"worker {failure.killed['worker']} is killed in the middle of step {done + 1}")]
    for kind, (first, last) in first_and_last.items():
        times = failure.times(kind)
        rows += [(times[0], first), (times[-1], last)] if times else []
    rows += [(failure.last(kind), text) for kind, text in lasts.items() if failure.events(kind)]
    return sorted(rows)


def evaluate(undisturbed: Run, disturbed: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, and whether all is as it should be."""
    failure = FirstFailure(disturbed)
    survivors = arguments.world - len(disturbed.of("killed"))
    finished = disturbed.of("done")
    accuracies = [run.of("done")[0]["accuracy"] for run in (undisturbed, disturbed)]
    difference = max(event["difference"] for event in disturbed.of("checked"))
    checks = {
        "accuracy_within_one_point": abs(accuracies[1] - accuracies[0])
        <= LARGEST_ACCURACY_DIFFERENCE,
        "survivors_finished": len(finished) == survivors,
        "survivors_hold_the_same_model": len({event["digest"] for event in finished}) == 1,
        "gradients_averaged_over_the_new_size": difference < LARGEST_GRADIENT_DIFFERENCE,
    }
    milliseconds = {
        f"{name}_ms": round(failure.last(kind), 2) if failure.events(kind) else None
        for name, kind in (
            ("last_error", "error"),
            ("membership_published", "published"),
            ("last_configured", "configured"),
            ("last_resumed", "resumed"),
        )
    }
    return {
        "ok": all(checks.values()),
        "world": [arguments.world, *range(arguments.world - 1, survivors - 1, -1)],
        "steps": arguments.steps,
        "accuracy": round(accuracies[1], 4),
        "accuracy_without_failure": round(accuracies[0], 4),
        "gradient_difference": difference,
        "after_kill": milliseconds,
        "checks": checks,
    }


def print_report(disturbed: Run, outcome: dict[str, Any]) -> None:
    print("\nafter the kill   what happened")
    for milliseconds, text in timeline(disturbed):
        print(f"  {milliseconds:9.1f} ms   {text}")
    print("\ntest accuracy")
    print(f"  {outcome['accuracy_without_failure']:12.2%}   without a failure")
    print(f"  {outcome['accuracy']:12.2%}   with one worker killed")
    for check, passed in outcome["checks"].items():
        if not passed:
            print(f"NOT AS PROMISED: {check.replace('_', ' ')}")


def _losses(run: Run) -> tuple[list[float], list[float], list[int]]:
    """(seconds since the first step, loss, world size) by step; a loss of NaN at the failure."""
    steps = run.of("step")
    gap = [{**event, "loss": math.nan, "world": steps[0]["world"]} for event in run.of("killed")]
    shown = sorted((*steps, *gap), key=lambda event: event["time"])
    start = steps[0]["time"]
    return (
        [event["time"] - start for event in shown],
        [event["loss"] for event in shown],
        [event["world"] for event in shown],
    )


def draw(undisturbed: Run, disturbed: Run, path: Path) -> None:
    """Loss and world size over time, the failure marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 5.5), height_ratios=[3, 1], layout="constrained"
    )
    times, losses, _ = _losses(undisturbed)
    above.semilogy(times, losses, color="0.7", lw=1, label="without a failure")
    times, losses, worlds = _losses(disturbed)
    above.semilogy(times, losses, color="tab:blue", lw=1.2, label="one worker killed")
    below.step(times, worlds, where="post", color="tab:blue", lw=2)

    failure = FirstFailure(disturbed)
    killed = failure.killed["time"] - disturbed.of("step")[0]["time"]
    for axes in (above, below):
        axes.axvline(killed, color="tab:red", ls="--", lw=1.2)
        axes.grid(alpha=0.25)
    above.annotate(
        f"worker killed in mid-step;\nnext good step {failure.last('resumed'):.0f} ms later",
        xy=(killed, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(8, 0),
        textcoords="offset points",
        va="top",
        color="tab:red",
    )
    above.set_ylabel("training loss")
    above.legend(loc="lower left")
    above.set_title(
        "Digits, DistributedDataParallel on torchft_ext: a worker dies, training goes on"
    )
    below.set_ylabel("world size")
    below.set_ylim(0, max(worlds) + 0.6)
    below.set_yticks(range(max(worlds) + 1))
    below.set_xlabel("seconds since the first step")
    figure.savefig(path, dpi=120)
