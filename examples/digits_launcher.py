"""The demonstration's launcher: starts the processes, and lets happen to them what the story says.

It does no more: who goes on after a fault, and from where, the workers agree on among themselves.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import digits_picture
import digits_report
from digits_processes import Event, Store, Worker
from digits_story import NEWCOMER, SPARE, Cue, Story, disturbed, undisturbed

RUN_LIMIT_S = 150.0
PARTS = 14  # of a run: the length of each quiet time between two acts
SCRIPT = Path(__file__).with_name("train_digits.py")


class DemoFailed(RuntimeError):
    """A worker failed, all were killed, or nothing happened for too long."""


@dataclass
class Run:
    """What happened in one training."""

    title: str = ""
    events: list[Event] = field(default_factory=list)
    told_whole: bool = False  # the story

    def of(self, kind: str, worker: int | None = None) -> list[Event]:
        every = (event for event in self.events if event["event"] == kind)
        return [event for event in every if worker in (None, event["worker"])]

    def note(self, kind: str, worker: int | None = None) -> Event:
        event = {"event": kind, "worker": worker, "time": time.monotonic()}
        self.events.append(event)
        return event


class Launcher:
    """One training from start to end. A context manager: no worker outlives it.

    Args:
        held: workers that start with the others, and join the job when the story admits them.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        store: Store,
        title: str,
        story: Story = undisturbed,
        held: tuple[int, ...] = (),
    ) -> None:
        self.run = Run(title)
        self._store = store
        self._while = max(1, arguments.steps // PARTS)
        self._acts: dict[int, float] = {}  # when the last one was, by worker
        self._done = 0  # committed steps
        self._world = 0
        self._progress = digits_report.Progress(title, arguments.steps)
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._place = TemporaryDirectory()
        self._slow = Path(self._place.name) / "slow"
        self._cues = story(self)
        self._cue: Cue | None = next(self._cues, None)
        self._workers = {
            number: Worker(number, self._command(arguments, number, number in held), self._inbox)
            for number in (*range(arguments.world), *held)
        }

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.end()
        self._place.cleanup()

    def _command(self, arguments: argparse.Namespace, number: int, held: bool) -> list[str]:
        job = re.sub(r"\W+", "-", self.run.title)
        options = {
            "address": f"127.0.0.1:{self._store.port}/{job}",
            "world": arguments.world,
            "steps": arguments.steps,
            "pace": arguments.pace,
            "seed": arguments.seed,
            "slow": self._slow,
        }
        told = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, str(SCRIPT), *told, *["--held"] * held]

    # ---- what the story does, and waits for ----

    def admit(self, worker: int) -> None:
        self._act("admitted", worker)
        self._workers[worker].order()

    def kill(self, worker: int) -> None:
        self._signal("killed", worker, signal.SIGKILL)

    def freeze(self, worker: int) -> None:
        self._signal("frozen", worker, signal.SIGSTOP)

    def thaw(self, worker: int) -> None:
        self._signal("thawed", worker, signal.SIGCONT)

    def kill_store(self) -> None:
        self._progress.happened(self.run.note("store killed"))
        self._store.process.kill()

    def in_mid_step(self, worker: int) -> Cue:
        began = time.monotonic()
        self._workers[worker].order()
        return lambda: self._has("in mid-step", worker, began)

    def after_a_while(self) -> Cue:
        until = self._done + self._while
        return lambda: self._done >= until

    def waits(self, worker: int) -> Cue:
        return self._await(lambda: self._has("ready", worker, self._acts[worker]))

    def trains(self, worker: int) -> Cue:
        return self._await(lambda: self._has("step", worker, self._acts[worker]))

    def world_is(self, size: int) -> Cue:
        return self._await(lambda: self._world == size)

    def _await(self, happened: Cue) -> Cue:
        """Of a process, which may take its time: the members train slowly meanwhile."""
        self._slow.touch()

        def cue() -> bool:
            if not happened():
                return False
            self._slow.unlink()
            return True

        return cue

    def _has(self, kind: str, worker: int, since: float) -> bool:
        return any(event["time"] > since for event in self.run.of(kind, worker))

    def _act(self, kind: str, worker: int) -> None:
        event = self.run.note(kind, worker)
        self._acts[worker] = event["time"]
        self._progress.happened(event)

    def _signal(self, kind: str, worker: int, number: signal.Signals) -> None:
        self._act(kind, worker)
        self._workers[worker].process.send_signal(number)

    # ---- what the workers tell ----

    def train(self) -> Run:
        """Returns when all members have ended. Raises DemoFailed."""
        handlers: dict[str, Callable[[Event], None]] = {
            "step": self._step_done,
            "view": self._view_told,
            "error": self._progress.happened,
            "left out": self._progress.happened,
            "ended": self._worker_ended,
        }
        deadline = time.monotonic() + RUN_LIMIT_S
        while self._anyone_trains():
            event = self._next_event(deadline)
            self.run.events.append(event)
            if event["event"] in handlers:
                handlers[event["event"]](event)
            while self._cue is not None and self._cue():
                self._cue = next(self._cues, None)
        self.run.told_whole = self._cue is None
        self._progress.finish()
        if not self.run.of("done"):
            raise DemoFailed(f"nobody is left\n{self._all_errors()}")
        return self.run

    def _anyone_trains(self) -> bool:
        """Whoever is not in the newest view, frozen or a spare, need not be waited for."""
        views = self.run.of("view")
        newest = max((event["view"] for event in views), default=0)
        members = {event["worker"] for event in views if event["view"] == newest}
        ended = {event["worker"] for event in self.run.of("ended")}
        return not members or bool(members - ended)

    def _next_event(self, deadline: float) -> Event:
        try:
            return self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise DemoFailed(
                f"not finished after {RUN_LIMIT_S:g} s\n{self._all_errors()}"
            ) from None

    def _step_done(self, event: Event) -> None:
        """The first worker that tells of a step counts."""
        if event["step"] > self._done:
            self._done, self._world = event["step"], event["world"]
            self._progress.step(event["step"], event["loss"], event["world"])

    def _view_told(self, event: Event) -> None:
        told = [other for other in self.run.of("view") if other["view"] == event["view"]]
        if len(told) == event["world"]:
            self._progress.view(told)

    def _worker_ended(self, event: Event) -> None:
        worker = self._workers[event["worker"]]
        status = worker.process.returncode
        if status > 0:  # an error of its own
            raise DemoFailed(f"worker {worker.number} ended with {status}\n{worker.errors()}")
        if status < 0 and not self.run.of("killed", worker.number):  # by somebody else
            self._act("killed", worker.number)

    def _all_errors(self) -> str:
        return "\n".join(f"worker {n}: {worker.errors()}" for n, worker in self._workers.items())


def demonstrate(arguments: argparse.Namespace) -> int:
    """Train twice, without and with faults, and report. The exit status: 0 if all is well."""
    began = time.monotonic()
    try:
        with Store() as store:
            with Launcher(arguments, store, "1 of 2: without a fault") as launcher:
                calm = launcher.train()
            title, held = "2 of 2: with faults", (SPARE, NEWCOMER)
            with Launcher(arguments, store, title, disturbed, held) as launcher:
                run = launcher.train()
    except DemoFailed as error:
        print(f"\nthe demonstration failed: {error}", file=sys.stderr)
        print(json.dumps({"ok": False, "error": str(error).splitlines()[0]}))
        return 1
    outcome = digits_report.evaluate(calm, run, arguments)
    digits_report.print_report(run, outcome)
    digits_picture.draw(calm, run, arguments.output)
    outcome["total_s"] = round(time.monotonic() - began, 1)
    print(json.dumps(outcome))
    return 0 if outcome["ok"] else 1
