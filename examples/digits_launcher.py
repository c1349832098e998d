"""The demonstration's launcher: holds the store, starts workers, kills one, tells the others."""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import digits_report
import torch.distributed as dist
from digits_membership import Membership, publish

RUN_LIMIT_S = 150.0
SCRIPT = Path(__file__).with_name("train_digits.py")
Event = dict[str, Any]  # "worker", "event", "time" (CLOCK_MONOTONIC, seconds), and the event's own


class DemoFailed(RuntimeError):
    """A worker failed, all were killed, or nothing happened for too long."""


@dataclass
class Run:
    """What happened in one training."""

    started: float = field(default_factory=time.monotonic)
    events: list[Event] = field(default_factory=list)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    def note(self, kind: str, worker: int, **fields: object) -> Event:
        event = {"event": kind, "worker": worker, "time": time.monotonic(), **fields}
        self.events.append(event)
        return event


class Worker:
    """One child process. A thread reads its lines into the launcher's inbox."""

    def __init__(self, number: int, command: list[str], inbox: queue.SimpleQueue[Event]) -> None:
        self.number = number
        self._stderr: IO[bytes] = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, args=(inbox,), daemon=True)
        self._reader.start()

    def _read(self, inbox: queue.SimpleQueue[Event]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                inbox.put({"worker": self.number, **json.loads(line)})
        self.process.wait()
        inbox.put({"worker": self.number, "event": "ended", "time": time.monotonic()})

    def errors(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")[-3000:]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._reader.join(timeout=30)
        self._stderr.close()


class Launcher:
    """One training from start to end. A context manager: no worker outlives it."""

    def __init__(self, arguments: argparse.Namespace, victim: int | None, title: str) -> None:
        self._victim = victim
        self._steps: int = arguments.steps
        self._progress = digits_report.Progress(title, arguments.steps)
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self._members = Membership.first(arguments.world)
        self._ranks = {number: number for number in range(arguments.world)}  # of living workers
        self.run = Run()
        self._workers = [
            Worker(number, self._command(arguments, number), self._inbox) for number in self._ranks
        ]

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def _command(self, arguments: argparse.Namespace, number: int) -> list[str]:
        # Without a victim, the step in which one would die is never reached.
        kill_step = 0 if self._victim is None else arguments.kill_step
        options = {
            "worker": number,
            "store-port": self._store.port,
            "world": arguments.world,
            "steps": arguments.steps,
            "kill-step": kill_step,
            "seed": arguments.seed,
        }
        return [sys.executable, str(SCRIPT), *(f"--{k}={v}" for k, v in options.items())]

    def train(self) -> Run:
        """Returns when every worker has ended. Raises DemoFailed."""
        running = set(self._ranks)
        deadline = time.monotonic() + RUN_LIMIT_S
        while running:
            event = self._next_event(deadline)
            self.run.events.append(event)
            if event["event"] == "step":
                self._progress.step(event["step"], event["loss"], event["world"])
            elif event["event"] == "in mid-step":
                self._kill(event["worker"])
            elif event["event"] == "ended":
                running.discard(event["worker"])
                self._worker_ended(self._workers[event["worker"]])
            elif event["event"] in ("error", "configured"):
                self._progress.happened(event)
        self._progress.finish()
        return self.run

    def _next_event(self, deadline: float) -> Event:
        try:
            return self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise DemoFailed(
                f"not finished after {RUN_LIMIT_S:g} s\n{self._all_errors()}"
            ) from None

    def _kill(self, number: int) -> None:
        time.sleep(0.1)  # until the others wait for the victim's part
        self._progress.happened(self.run.note("killed", number))
        os.kill(self._workers[number].process.pid, signal.SIGKILL)

    def _worker_ended(self, worker: Worker) -> None:
        status = worker.process.returncode
        if status == 0:
            return
        rank = self._ranks.pop(worker.number)
        if status > 0 or not self._ranks:  # an error of its own; or it was the last one
            raise DemoFailed(f"worker {worker.number} ended with {status}\n{worker.errors()}")
        if worker.number not in [event["worker"] for event in self.run.of("killed")]:
            self._progress.happened(self.run.note("killed", worker.number))  # by somebody else
        self._members = self._members.without(rank)
        self._ranks = {who: self._members.ranks[rank] for who, rank in self._ranks.items()}
        publish(self._store, self._members)
        self.run.note("published", worker.number)

    def _all_errors(self) -> str:
        return "\n".join(f"worker {w.number}: {w.errors()}" for w in self._workers)


def demonstrate(arguments: argparse.Namespace, victim: int) -> int:
    """Train twice, without and with a failure, and report. The exit status: 0 if all is well."""
    began = time.monotonic()
    runs = []
    titles = (
        "1 of 2: without a failure",
        f"2 of 2: worker {victim} is killed in the middle of step {arguments.kill_step}",
    )
    for title, who in zip(titles, (None, victim), strict=True):
        try:
            with Launcher(arguments, who, title) as launcher:
                runs.append(launcher.train())
        except DemoFailed as error:
            print(f"\nthe demonstration failed: {error}", file=sys.stderr)
            print(json.dumps({"ok": False, "error": str(error).splitlines()[0]}))
            return 1
    undisturbed, disturbed = runs
    outcome = digits_report.evaluate(undisturbed, disturbed, arguments)
    digits_report.print_report(disturbed, outcome)
    digits_report.draw(undisturbed, disturbed, arguments.output)
    outcome["total_s"] = round(time.monotonic() - began, 1)
    print(json.dumps(outcome))
    return 0 if outcome["ok"] else 1
