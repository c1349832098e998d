"""The demonstration's picture: loss, world size, and the phases of each recovery."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import matplotlib
from digits_recoveries import PHASES, recoveries_of
from matplotlib.axes import Axes

if TYPE_CHECKING:
    from digits_launcher import Run

ACTS = {
    "killed": "killed",
    "frozen": "frozen",
    "thawed": "thawed",
    "admitted": "joins",
    "store killed": "store killed",
}


def draw(calm: Run, run: Run, path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (loss, world, phases) = pyplot.subplots(
        3, 1, figsize=(9, 8), height_ratios=[3, 1.2, 2], layout="constrained"
    )
    world.sharex(loss)
    _draw_losses(loss, calm, run)
    _draw_world(world, run)
    _draw_phases(phases, run)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _start(run: Run) -> float:
    return float(run.of("step")[0]["time"])


def _losses(run: Run) -> tuple[list[float], list[float]]:
    """Seconds since the first step, and the mean loss of all members, by step."""
    start = _start(run)
    by_step: dict[int, list[tuple[float, float]]] = {}
    for event in run.of("step"):
        by_step.setdefault(event["step"], []).append((event["time"] - start, event["loss"]))
    points = [by_step[step] for step in sorted(by_step)]
    times = [min(time for time, _ in told) for told in points]
    return times, [fmean(loss for _, loss in told) for told in points]


def _draw_losses(axes: Axes, calm: Run, run: Run) -> None:
    axes.semilogy(*_losses(calm), color="0.7", lw=1, label="without a fault")
    axes.semilogy(*_losses(run), color="tab:blue", lw=1.2, label="with faults")
    start = _start(run)
    for event in run.events:
        if event["event"] not in ACTS:
            continue
        who = "" if event["worker"] is None else f"worker {event['worker']} "
        at = event["time"] - start
        axes.axvline(at, color="tab:red", ls="--", lw=1)
        axes.annotate(
            who + ACTS[event["event"]],
            xy=(at, 0.98),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            rotation=90,
            va="top",
            fontsize=8,
            color="tab:red",
        )
    axes.set_ylabel("training loss")
    axes.legend(loc="lower left")
    axes.grid(alpha=0.25)
    axes.set_title("Digits, DistributedDataParallel, elastic.steps(): training goes on")


def _draw_world(axes: Axes, run: Run) -> None:
    start = _start(run)
    steps = run.of("step")
    sizes = [event["world"] for event in steps]
    times = [event["time"] - start for event in steps]
    axes.step(times, sizes, where="post", color="tab:blue", lw=2)
    for event in run.of("killed") + run.of("frozen"):
        axes.axvline(event["time"] - start, color="tab:red", ls="--", lw=1)
    axes.set_ylabel("world size")
    axes.set_ylim(0, max(sizes) + 0.6)
    axes.set_yticks(range(max(sizes) + 1))
    axes.set_xlabel("seconds since the first step")
    axes.grid(alpha=0.25)


def _draw_phases(axes: Axes, run: Run) -> None:
    recoveries = list(recoveries_of(run))
    labels = [
        each.what if each.heard is None else f"{each.what}\n(heard of after {each.heard:.0f} ms)"
        for each in recoveries
    ]
    ends = [0.0] * len(recoveries)
    for phase in PHASES:
        spent = [each.phases[phase] for each in recoveries]
        axes.barh(labels, spent, left=ends, label=phase)
        ends = [end + more for end, more in zip(ends, spent, strict=True)]
    axes.invert_yaxis()
    axes.margins(y=0.15)
    axes.set_xlabel("ms from there to the next committed step")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(PHASES), fontsize=8)
    axes.grid(alpha=0.25, axis="x")
