"""Members of an elastic job that train while processes die, freeze and join.

    python tests/soak --minutes 2         CI's; `make soak MINUTES=15` for longer
    python tests/soak --rule store        the store decides, instead of a quorum of members

Every 0.5 to 2 s a member is killed, frozen for 2.5 s (then it finds itself left out, and joins
again), or a process joins; worlds have 2 to 6 members. Under the members' rule the store's process
is killed in the last tenth of the time, and from then on nobody joins. At the end all leave.
What must hold:

  no hang              all end by themselves
  no divergence        processes that have the same step have the same digest of the state there
  exact samples        every step begins where the one before ended, on every process that saw it
  nothing is gathered  threads and descriptors of the process that lived longest stay as they were

The last line is JSON. Exit status 1: something did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

import ranks  # noqa: E402
import soak_member  # noqa: E402

FOUNDERS = 4
LARGEST = 6
FROZEN_S = 2.5
PATIENCE = 90.0
MORE_THREADS = 2
MORE_DESCRIPTORS = 12  # more members, more connections


class Store:
    """The store's process, on a port of its own."""

    def __init__(self) -> None:
        command = [
            sys.executable,
            "-m",
            "torchft_ext.elastic",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.port = int(line.split("port ")[1].split(";")[0])
        self.alive = True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.alive = False


class Soak:
    """One job, and what happens to it."""

    def __init__(self, pool: ranks.Pool, arguments: argparse.Namespace) -> None:
        self._pool = pool
        self._arguments = arguments
        self._chance = random.Random(arguments.seed)
        self._store = Store()
        self._address = f"127.0.0.1:{self._store.port}/soak"
        self._calls: dict[int, ranks.Call] = {}  # by worker number
        self._workers: dict[int, ranks.Worker] = {}
        self._thaw_at: dict[int, float] = {}
        self.faults = {"killed": 0, "frozen": 0, "joined": 0, "store": 0}
        self._before: dict[int, dict[str, Any]] = {}
        self._stranded: list[soak_member.Record] = []

    def run(self) -> dict[str, Any]:
        for worker in self._pool.borrow(FOUNDERS):
            self._begin(worker)
        self._await_steps(20)
        for number, worker in self._workers.items():
            self._before[number] = self._ask(worker, soak_member.usage)
        until = time.monotonic() + 60 * self._arguments.minutes
        store_until = until - 6 * self._arguments.minutes
        latest = until + PATIENCE
        while time.monotonic() < (latest if self._may_lose_store() else until):
            time.sleep(self._chance.uniform(0.5, 2.0))
            self._thaw()
            self._check_calls()
            if self._may_lose_store() and time.monotonic() > store_until:
                if not self._settled():
                    continue  # who joins, perhaps again, needs it
                self._store.kill()
                self.faults["store"] += 1
            else:
                self._strike()
            self._progress(until - time.monotonic())
        return self._end()

    def _may_lose_store(self) -> bool:
        """A quorum of members goes on without it; under its own rule nobody does."""
        return self._store.alive and self._arguments.rule == "members"

    def _begin(self, worker: ranks.Worker) -> None:
        self._workers[worker.number] = worker
        arguments = (self._address, FOUNDERS, self._arguments.rule)
        self._calls[worker.number] = worker.call(soak_member.live, arguments, {})

    @staticmethod
    def _ask(worker: ranks.Worker, function: Any) -> Any:
        return worker.call(function, (), {}, "side").value(PATIENCE)

    def _await_steps(self, count: int) -> None:
        limit = time.monotonic() + PATIENCE
        first = next(iter(self._workers.values()))
        while self._ask(first, soak_member.so_far)[0] < count:
            self._check_calls()
            if time.monotonic() > limit:
                raise ranks.Hang(f"no {count} steps" + self._pool.dump_stacks())
            time.sleep(0.1)

    def _running(self) -> list[int]:
        return [n for n, worker in self._workers.items() if worker.alive()]

    def _size(self) -> int:
        """Of the newest view that anybody trains in."""
        found = [self._ask(self._workers[n], soak_member.so_far) for n in self._running()]
        return max(found, key=lambda f: f[1])[2] if found else 0

    def _settled(self) -> bool:
        """Nobody is still coming or going."""
        return not self._thaw_at and self._size() == len(self._running())

    def _strike(self) -> None:
        running, size = self._running(), self._size()
        kinds = []
        if self._store.alive and len(self._workers) < LARGEST and not self._thaw_at:
            kinds.append("joined")
        # A quorum has to be left: of an odd number, or of an even one with the store.
        if size >= 3 and self._settled():
            kinds += ["killed", "killed", "frozen"] if self._store.alive else ["killed"]
        if not kinds:
            return
        kind = self._chance.choice(kinds)
        self.faults[kind] += 1
        if kind == "joined":
            self._begin(self._pool.borrow(1)[0])
            self._pool.start_spare()
            return
        victim = self._chance.choice(running)
        if kind == "killed":
            self._forget(victim).kill()
        else:
            self._workers[victim].freeze()
            self._thaw_at[victim] = time.monotonic() + FROZEN_S

    def _thaw(self) -> None:
        for number, when in list(self._thaw_at.items()):
            if time.monotonic() >= when:
                del self._thaw_at[number]
                self._workers[number].thaw()

    def _check_calls(self) -> None:
        """None ends before it is told to."""
        for number, call in list(self._calls.items()):
            if not call.future.done():
                continue
            record = call.value()  # raises what it ended with
            if not record.stranded or self._store.alive:
                raise AssertionError(f"worker {number} ended by itself")
            self._stranded.append(record)
            self._forget(number)

    def _forget(self, number: int) -> ranks.Worker:
        self._calls.pop(number)
        self._before.pop(number, None)
        return self._workers.pop(number)

    def _progress(self, left: float) -> None:
        steps = max(self._ask(self._workers[n], soak_member.so_far)[0] for n in self._running())
        told = ", ".join(f"{v} {k}" for k, v in self.faults.items())
        print(f"{left:5.0f} s left; step {steps}, {self._size()} members; {told}", flush=True)

    def _end(self) -> dict[str, Any]:
        for worker in self._workers.values():
            if worker.frozen:
                worker.thaw()
        self._thaw_at.clear()
        time.sleep(2 * FROZEN_S if self.faults["frozen"] else 0)
        after = {n: self._ask(self._workers[n], soak_member.usage) for n in self._before}
        for worker in self._workers.values():
            self._ask(worker, soak_member.stop)
        records = [call.value(PATIENCE) for call in self._calls.values()] + self._stranded
        if self._store.alive:
            self._store.kill()
        return self._judge(records, after)

    def _judge(
        self, records: list[soak_member.Record], after: dict[int, dict[str, Any]]
    ) -> dict[str, Any]:
        problems = [*divergences(records), *inexact_samples(records), *self._gathered(after)]
        steps = max(max(r.steps, default=-1) for r in records) + 1
        return {
            "soak": "elastic",
            "rule": self._arguments.rule,
            "minutes": self._arguments.minutes,
            "seed": self._arguments.seed,
            "faults": self.faults,
            "views": max(number for r in records for number, _ in r.views),
            "steps": steps,
            "stranded": len(self._stranded),
            "left_out_and_back": sum(r.left_out for r in records),
            "slowest_step_s": round(max(r.slowest_step_s for r in records), 3),
            "usage": {
                str(n): [counted(self._before[n]), counted(used)] for n, used in after.items()
            },
            "problems": problems,
        }

    def _gathered(self, after: dict[int, dict[str, Any]]) -> list[str]:
        problems = []
        for number, used in after.items():
            before = self._before[number]
            added = Counter(used["threads"]) - Counter(before["threads"])
            if added.total() > MORE_THREADS:
                problems.append(f"worker {number}: more threads than at first: {dict(added)}")
            if used["descriptors"] > before["descriptors"] + MORE_DESCRIPTORS:
                problems.append(
                    f"worker {number}: {before['descriptors']} descriptors, {used['descriptors']}"
                )
        return problems


def counted(usage: dict[str, Any]) -> dict[str, int]:
    return {**usage, "threads": len(usage["threads"])}


def divergences(records: list[soak_member.Record]) -> list[str]:
    known: dict[int, str] = {}
    problems = []
    for record in records:
        for step, digest in record.digests.items():
            if known.setdefault(step, digest) != digest:
                problems.append(f"different states after step {step}")
    return problems


def inexact_samples(records: list[soak_member.Record]) -> list[str]:
    known: dict[int, tuple[int, int]] = {}
    problems = []
    for record in records:
        for step, found in record.steps.items():
            if known.setdefault(step, found) != found:
                problems.append(f"step {step}: {known[step]} and {found}")
    for step, (cursor, size) in sorted(known.items()):
        after = known.get(step + 1)
        if after is not None and after[0] != cursor + size * soak_member.BATCH:
            problems.append(f"step {step + 1} begins at {after[0]}, after {cursor} of {size}")
    return problems


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/soak",
        description=(__doc__ or "").split("\n\n")[0],
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="default %(default)s")
    parser.add_argument("--rule", choices=("members", "store"), default="members")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "python")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        pool = ranks.Pool(Path(folder), env)
        try:
            result = Soak(pool, arguments).run()
        finally:
            pool.close()
    print(json.dumps(result))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
