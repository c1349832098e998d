"""Members of an elastic job that train while processes die, freeze and join.

    python tests/soak --minutes 2         CI's; `make soak MINUTES=15` for longer
    python tests/soak --rule store        the store decides, instead of a quorum of members
    python tests/soak --shards 2          replicas of a sharded model, instead of DDP
    python tests/soak --cuts              each process on a host of its own; needs root and iproute2

Every 0.5 to 2 s a member is killed, frozen for 2.5 s or hung in its program for 6 s (then it finds
itself left out, and joins again), or a process joins; worlds have 2 to 6 members. They train with a
scheduler, and accumulate gradients. With --cuts a member is also cut off from
all others and the store, or two members from each other, for 2.5 s. The first fault then cuts the
four founders in two halves, each of which still reaches the store, for 6 s. Under the members' rule
the store's process is killed in the last tenth of the time, and from then on nobody joins. At the
end all leave.
What must hold:

  no hang              all end by themselves
  one side goes on     of two halves that do not see each other at most one trains in a new view;
                       once they do again, all are in one view
  no divergence        processes that have the same step have the same digest of the state there
  exact samples        every step begins where the one before ended, on every process that saw it
  nothing is gathered  threads, descriptors and memory of processes that live long stay as they
                       were, and so do the store's keys, whoever joins

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import folders  # noqa: E402

sys.path[:0] = folders.of_python_tests()

import ranks  # noqa: E402
import soak_member  # noqa: E402
import soak_network  # noqa: E402
import torch.distributed as dist  # noqa: E402

FOUNDERS = 4
LARGEST = 6
FROZEN_S = 2.5
HUNG_S = 6.0  # longer than members wait for one that hangs
SPLIT_S = 6.0  # long enough for one half to go on
PATIENCE = 90.0
MORE_THREADS = 2
MORE_DESCRIPTORS = 12  # more members, more connections
MORE_RESIDENT = 48 << 20  # bytes
MORE_KEYS = 8


class Store:
    """The store's process, on a port of its own."""

    def __init__(self, host: str) -> None:
        command = [
            sys.executable,
            "-m",
            "torchft_ext.elastic",
            "--host",
            host,
            "--port",
            "0",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.port = int(line.split("port ")[1].split(";")[0])
        self.alive = True
        self._client = dist.TCPStore(host, self.port, is_master=False)

    def keys(self) -> int:
        """How many keys it has; this is no member's call."""
        return self._client.num_keys()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.alive = False


class Soak:
    """One job, and what happens to it."""

    def __init__(
        self,
        pool: ranks.Pool,
        arguments: argparse.Namespace,
        network: soak_network.Network | None,
    ) -> None:
        self._pool = pool
        self._arguments = arguments
        self._network = network
        self._chance = random.Random(arguments.seed)
        host = "127.0.0.1" if network is None else soak_network.STORE_ADDRESS
        self._store = Store(host)
        self._address = f"{host}:{self._store.port}/soak"
        self._keys: list[int] = []  # the store's: at first, then the newest count
        self._calls: dict[int, ranks.Call] = {}  # by worker number
        self._workers: dict[int, ranks.Worker] = {}
        self._mend: list[tuple[float, Callable[[], None]]] = []  # when, how
        self.faults = {"killed": 0, "frozen": 0, "hung": 0, "joined": 0, "store": 0}
        if network is not None:
            self.faults |= {"cut off": 0, "pair cut": 0, "split": 0}
        self._before: dict[int, dict[str, Any]] = {}
        self._stranded: list[soak_member.Record] = []
        self._halves_went_on: list[int] = []  # of each split: in how many halves somebody did

    def run(self) -> dict[str, Any]:
        for worker in self._pool.borrow(FOUNDERS):
            self._begin(worker)
        self._await_steps(20)
        for number, worker in self._workers.items():
            self._before[number] = self._ask(worker, soak_member.usage)
        self._keys = [self._store.keys()] * 2
        until = time.monotonic() + 60 * self._arguments.minutes
        store_until = until - 6 * self._arguments.minutes
        latest = until + PATIENCE
        while time.monotonic() < (latest if self._may_lose_store() else until):
            time.sleep(self._chance.uniform(0.5, 2.0))
            self._mend_all(time.monotonic())
            self._check_calls()
            if self._may_lose_store() and time.monotonic() > store_until:
                if not self._settled():
                    continue  # who joins, perhaps again, needs it
                self._keys[1] = self._store.keys()
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
        arguments = (self._address, FOUNDERS, self._arguments.rule, self._arguments.shards)
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
        return not self._mend and self._size() == len(self._running())

    def _strike(self) -> None:
        running, size = self._running(), self._size()
        if self._may_split(size):
            self._split(running)
            return
        kinds = []
        if self._store.alive and len(self._workers) < LARGEST and not self._mend:
            kinds.append("joined")
        # A quorum has to be left: of an odd number, or of an even one with the store. And a copy of
        # each shard: two whole replicas may lose one member.
        shards = self._arguments.shards
        if size >= (3 if shards == 1 else 2 * shards) and self._settled():
            kinds += ["killed", "killed"]
            if self._store.alive:  # who comes back joins again there
                kinds += [kind for kind in self.faults if kind in self._passing()]
        if not kinds:
            return
        kind = self._chance.choice(kinds)
        self.faults[kind] += 1
        victims = self._chance.sample(running, min(2, len(running)))
        if kind == "joined":
            self._begin(self._pool.borrow(1)[0])
            self._pool.start_spare()
        elif kind == "killed":
            self._kill(victims[0])
        else:
            strike, mend = self._passing()[kind]
            strike(victims)
            lasts = HUNG_S if kind == "hung" else FROZEN_S
            self._mend.append((time.monotonic() + lasts, lambda: mend(victims)))

    def _may_split(self, size: int) -> bool:
        """Once, and where either half has a whole copy of the state."""
        is_due = self.faults.get("split") == 0 and self._arguments.shards == 1
        return is_due and size == 4 and self._store.alive and self._settled()

    def _split(self, running: list[int]) -> None:
        """Cut a view of four in two halves that both reach the store."""
        network, halves = self._network, (running[:2], running[2:])
        assert network is not None
        self.faults["split"] += 1
        number = max(self._newest_view(n) for n in running)
        network.cut_between(*halves)

        def heal() -> None:
            went_on = [any(self._newest_view(n) > number for n in half) for half in halves]
            self._halves_went_on.append(sum(went_on))
            network.cut_between(*halves, cut=False)
            self._await_joiners()

        self._mend.append((time.monotonic() + SPLIT_S, heal))

    def _newest_view(self, number: int) -> int:
        """In which this worker has committed a step."""
        return int(self._ask(self._workers[number], soak_member.so_far)[1])

    def _passing(
        self,
    ) -> dict[str, tuple[Callable[[list[int]], None], Callable[[list[int]], None]]]:
        """Faults that pass: what begins and what ends them, for two victims."""
        workers, network = self._workers, self._network
        found = {
            "frozen": (lambda v: workers[v[0]].freeze(), lambda v: workers[v[0]].thaw()),
            "hung": (
                lambda v: self._ask(workers[v[0]], soak_member.hang),
                lambda v: self._ask(workers[v[0]], soak_member.go_on),
            ),
        }
        if network is not None:
            found["cut off"] = (
                lambda v: network.cut_off(v[0]),
                lambda v: network.cut_off(v[0], cut=False),
            )
            found["pair cut"] = (
                lambda v: network.cut_pair((v[0], v[1])),
                lambda v: network.cut_pair((v[0], v[1]), cut=False),
            )
        return found

    def _kill(self, number: int) -> None:
        self._forget(number).kill()
        if self._network is not None:
            self._network.remove(number)

    def _mend_all(self, until: float) -> None:
        due = [mend for when, mend in self._mend if when <= until]
        self._mend = [(when, mend) for when, mend in self._mend if when > until]
        for mend in due:
            mend()

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
        self._mend_all(float("inf"))
        time.sleep(2 * FROZEN_S if self.faults["frozen"] else 0)
        self._await_joiners()
        if self._store.alive:
            self._keys[1] = self._store.keys()
        after = {n: self._ask(self._workers[n], soak_member.usage) for n in self._before}
        for worker in self._workers.values():
            self._ask(worker, soak_member.stop)
        records = [call.value(PATIENCE) for call in self._calls.values()] + self._stranded
        return self._judge(records, after)

    def _await_joiners(self) -> None:
        """Who still joins would find that all others have gone."""
        limit = time.monotonic() + PATIENCE
        while not self._settled():
            self._check_calls()
            if time.monotonic() > limit:
                raise ranks.Hang("some never came to a view" + self._pool.dump_stacks())
            time.sleep(0.1)

    def close(self) -> None:
        """End the store's process."""
        if self._store.alive:
            self._store.kill()

    def _judge(
        self, records: list[soak_member.Record], after: dict[int, dict[str, Any]]
    ) -> dict[str, Any]:
        problems = [*divergences(records), *inexact_samples(records), *self._gathered(after)]
        if any(count > 1 for count in self._halves_went_on):
            problems.append("both halves of a view that was cut in two went on")
        if self._keys[1] > self._keys[0] + MORE_KEYS:
            problems.append(f"the store: {self._keys[0]} keys, {self._keys[1]}")
        steps = max(max(r.steps, default=-1) for r in records) + 1
        return {
            "soak": "elastic",
            "rule": self._arguments.rule,
            "shards": self._arguments.shards,
            "minutes": self._arguments.minutes,
            "seed": self._arguments.seed,
            "faults": self.faults,
            "views": max(number for r in records for number, _ in r.views),
            "steps": steps,
            "halves_that_went_on": self._halves_went_on,
            "stranded": len(self._stranded),
            "left_out_and_back": sum(r.left_out for r in records),
            "store_keys": self._keys,
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
            if used["resident"] > before["resident"] + MORE_RESIDENT:
                grown = (used["resident"] - before["resident"]) >> 20
                problems.append(f"worker {number}: {grown} MiB more than at first")
        return problems


def counted(usage: dict[str, Any]) -> dict[str, int]:
    return {**usage, "threads": len(usage["threads"])}


def divergences(records: list[soak_member.Record]) -> list[str]:
    known: dict[tuple[int, int], str] = {}
    problems = []
    for record in records:
        for (step, shard), digest in record.digests.items():
            if known.setdefault((step, shard), digest) != digest:
                problems.append(f"different states of shard {shard} after step {step}")
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
    parser.add_argument("--shards", type=int, default=1, help="2: a sharded model; default 1: DDP")
    parser.add_argument("--cuts", action="store_true", help="cut networks too; needs root")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.cuts:
        soak_network.enter()
    network = soak_network.Network() if arguments.cuts else None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    paths = os.pathsep.join([str(HERE), *folders.of_python_tests()])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        pool = ranks.Pool(Path(folder), env, host_of=network and network.command)
        soak = Soak(pool, arguments, network)
        try:
            result = soak.run()
        finally:
            soak.close()
            pool.close()
    print(json.dumps(result))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
