"""What followed each fault, from the events of one training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from digits_launcher import Run
    from digits_processes import Event

PHASES = ("agree", "connect", "tables", "sync", "repeat")  # "repeat": the step that is run again
VERBS = {"killed": "is killed", "frozen": "is frozen"}


@dataclass(frozen=True)
class Recovery:
    """A change of members. Times in ms.

    Attributes:
        what: in words.
        view: its number.
        workers: that take part from then on.
        heard: from the fault until the last survivor knew of it; None: there was no fault.
        phases: of the last survivor to be ready, and the step that followed.
        downtime: from the fault, or from the boundary at which a newcomer was let in, until the
            last member had committed its next step.
        at: when it began, as events have it.
    """

    what: str
    view: int
    workers: tuple[int, ...]
    heard: float | None
    phases: dict[str, float]
    downtime: float
    at: float


def views_of(run: Run) -> dict[int, list[Event]]:
    """What was told of each view in which steps were committed, by number."""
    used = sorted({event["view"] for event in run.of("step")})
    told = run.of("view")
    return {view: [event for event in told if event["view"] == view] for view in used}


def recoveries_of(run: Run) -> Iterator[Recovery]:
    before: set[int] = set()
    for number, told in views_of(run).items():
        now = {event["worker"] for event in told}
        if before:
            yield _recovery(run, number, told, before)
        before = now


def _recovery(run: Run, number: int, told: list[Event], before: set[int]) -> Recovery:
    workers = {event["worker"] for event in told}
    ready = max((e for e in told if e["continuing"]), key=lambda event: event["time"])
    phases = {name: ready["phases"].get(name, 0.0) for name in PHASES}
    begun = ready["time"] - sum(phases.values())
    fault = _fault(run, before - workers, ready["time"])
    first_steps = {e["worker"]: e["time"] for e in reversed(run.of("step")) if e["view"] == number}
    end = max(first_steps.values())
    phases["repeat"] = end - ready["time"]
    heard = None if fault is None else _heard(run, fault["time"], ready["time"])
    at = begun if fault is None else min(fault["time"], begun)
    return Recovery(
        what=_words(run, fault, before, workers),
        view=number,
        workers=tuple(sorted(workers)),
        heard=heard,
        phases={name: round(spent * 1e3, 2) for name, spent in phases.items()},
        downtime=round((end - at) * 1e3, 2),
        at=at,
    )


def _fault(run: Run, lost: set[int], until: float) -> Event | None:
    """Why these are not there any more: the last fault before, or one that was noticed later."""
    faults = [event for event in run.events if event["event"] in VERBS and event["worker"] in lost]
    before = [event for event in faults if event["time"] < until]
    return before[-1] if before else next(iter(faults), None)


def _heard(run: Run, since: float, until: float) -> float | None:
    times = [e["time"] for e in run.of("error") if since < e["time"] < until]
    return round((max(times) - since) * 1e3, 2) if times else None


def _words(run: Run, fault: Event | None, before: set[int], workers: set[int]) -> str:
    words = [] if fault is None else [f"worker {fault['worker']} {VERBS[fault['event']]}"]
    for worker in sorted(workers - before):
        verb = "comes back" if run.of("frozen", worker) else "steps in" if fault else "joins"
        words.append(f"worker {worker} {verb}")
    return ", ".join(words) or "the same members"
