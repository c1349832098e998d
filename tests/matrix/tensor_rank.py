"""One rank of the failure matrix whose default group is one of torchft_ext.process_group's.

    python tensor_rank.py STORE_HOST:PORT HEARTBEAT_SECONDS local|tcp

It understands of the native rank's commands (tests/cpp/programs/rank/rank_main.cpp) those that its cases
need, and says the same events. Two are its own:

    be KIND     the default group is a ProcessGroupKIND from now on; another of an earlier case stays
                as it is, with its spare child. BabyNCCL's device and NCCL are simulated
    die_child HOW   kill or stop: that signal to the child process of the default group

A group of another name is a ProcessGroupHost.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from torchft_ext import errors
from torchft_ext import process_group as groups

MARK = -12345.0
LIMIT = 60.0  # seconds; reached only when something hangs


class Operations:
    """One operation of the matrix with buffers of its own; every value of a result is checked."""

    def __init__(
        self, group: groups.ProcessGroup, name: str, elements: int, device: torch.device
    ) -> None:
        """Buffers are made anew for each round, on that device."""
        self._group, self._name, self._elements = group, name, elements
        self._device = device
        self._input = self._output = torch.empty(0)

    def run_once(self) -> None:
        """Issue it (a ring's send and receive both), wait, and look at the result."""
        self._prepare()
        works = self._issue()
        failure: BaseException | None = None
        for work in works:
            try:
                work.wait()
            except errors.CommError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        expected = self._expected()
        if not torch.equal(self._output.cpu(), expected):
            raise AssertionError(f"{self._name} succeeded with a wrong value: {self._output}")

    def mark(self) -> None:
        """Mark every buffer, after release."""
        self._input.fill_(MARK)
        self._output.fill_(MARK)

    def unchanged(self) -> bool:
        """Whether all still carry the mark."""
        return all(bool((one.cpu() == MARK).all()) for one in (self._input, self._output))

    def _prepare(self) -> None:
        rank, size = self._group.rank(), self._group.size()
        wide_input = self._name in ("reduce_scatter", "alltoall")
        wide_output = self._name in ("allgather", "alltoall")
        mine = float(rank + 1)
        self._input = self._full(size if wide_input else 1, mine)
        first = mine if self._name == "allreduce" or (self._name, rank) == ("broadcast", 0) else 0.0
        self._output = self._full(size if wide_output else 1, first)

    def _full(self, count: int, value: float) -> torch.Tensor:
        return torch.full((self._elements * count,), value, device=self._device)

    def _issue(self) -> list[Any]:
        group, given, got = self._group, self._input, self._output
        rank, size = group.rank(), group.size()
        if self._name == "sendrecv":
            return self._ring(rank, size)
        issue = {
            "allreduce": lambda: group.allreduce([got]),
            "broadcast": lambda: group.broadcast_one(got, 0),
            "allgather": lambda: group.allgather([list(got.chunk(size))], [given]),
            "reduce_scatter": lambda: group.reduce_scatter([got], [list(given.chunk(size))]),
            "alltoall": lambda: group.alltoall(list(got.chunk(size)), list(given.chunk(size))),
            "barrier": group.barrier,
        }[self._name]
        return [issue()]

    def _ring(self, rank: int, size: int) -> list[Any]:
        group, given, got = self._group, self._input, self._output

        def send() -> Any:
            return group.send([given], (rank + 1) % size, 0)

        def receive() -> Any:
            return group.recv([got], (rank - 1) % size, 0)

        # On a device one waits for the other: a ring whose members all send first stands still.
        receives_first = self._device.type != "cpu" and rank % 2 == 1
        return [one() for one in ((receive, send) if receives_first else (send, receive))]

    def _expected(self) -> torch.Tensor:
        rank, size = self._group.rank(), self._group.size()
        ranks = torch.arange(1.0, size + 1)
        if self._name in ("allgather", "alltoall"):
            return ranks.repeat_interleave(self._elements)
        value = {
            "allreduce": ranks.sum().item(),
            "reduce_scatter": ranks.sum().item(),
            "broadcast": 1.0,
            "sendrecv": float((rank - 1) % size + 1),
        }.get(self._name, 0.0)  # a barrier writes nothing
        return torch.full((self._elements,), value)


class Member:
    """One name's group. Commands that operate run on a thread of its own, in order."""

    def __init__(self, name: str, store: str) -> None:
        """A ProcessGroupHost; be() makes it another one."""
        self._name, self._store = name, store
        self._made: dict[str, groups.ProcessGroup] = {}
        self._kind = "Host"
        self._device = torch.device("cpu")
        self._operations: Operations | None = None
        self._leaving = threading.Event()
        self._commands: queue.Queue[list[str]] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def group(self) -> groups.ProcessGroup:
        """The group that it is now."""
        if self._kind not in self._made:
            made = getattr(groups, f"ProcessGroup{self._kind}")(timeout=LIMIT)
            self._made[self._kind] = made
        return self._made[self._kind]

    def command(self, name: str, words: list[str]) -> None:
        """One of its commands; main thread."""
        if name == "abort":
            self.group.abort()
        elif name == "die_child":
            child = self.group.child_pid()
            os.kill(child, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[words[0]])
        else:
            if name == "shutdown":  # between two rounds of a loop
                self._leaving.set()
            self._commands.put([name, *words])

    def end(self) -> None:
        """Shut all its groups down."""
        for group in self._made.values():
            group.shutdown()

    def _work(self) -> None:
        # By which the matrix knows the thread whose waits for a core count.
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("rank-worker")
        while True:
            name, *words = self._commands.get()
            try:
                getattr(self, f"_{name}")(*words)
            except Exception as error:
                say(self._name, "error", text=f"{name}: {type(error).__name__}: {error}")

    def _be(self, kind: str) -> None:
        self._kind = kind
        self._device = simulated_device() if kind == "BabyNCCL" else torch.device("cpu")

    def _configure(self, prefix: str, rank: str, size: str, limit_ms: str) -> None:
        group = self.group
        group.set_timeout(timedelta(milliseconds=int(limit_ms)))
        address = f"{self._store}/{prefix}"
        failure = failure_of(lambda: group.configure(address, int(rank), int(size)))
        say(self._name, "configured", **fields(failure), t_ns=now())

    def _new(self, operation: str, elements: str) -> Operations:
        return Operations(self.group, operation, int(elements), self._device)

    def _loop(self, operation: str, elements: str) -> None:
        self._operations = operations = self._new(operation, elements)
        failure = None
        while failure is None and not self._leaving.is_set():
            failure = failure_of(operations.run_once)
        at = now()
        operations.mark()
        say(self._name, "failed", **fields(failure), t_ns=at)

    def _once(self, operation: str, elements: str) -> None:
        self._operations = operations = self._new(operation, elements)
        failure = failure_of(operations.run_once)
        at = now()
        operations.mark()
        say(self._name, "done", **fields(failure), t_ns=at)

    def _check(self) -> None:
        operations = self._operations
        say(self._name, "checked", unchanged=operations is None or operations.unchanged())

    def _shutdown(self) -> None:
        self._made.pop(self._kind).shutdown()
        self._leaving.clear()
        say(self._name, "left", ok=True)


def simulated_device() -> torch.device:
    """One of the simulator's, which is loaded once it is wanted; each process has all of them."""
    path = str(Path(__file__).resolve().parents[1] / "gpu")
    if path not in sys.path:
        sys.path.append(path)
    accelerator: Any = importlib.import_module("accelerator")
    accelerator.prepare_children()
    device: torch.device = accelerator.device()
    return device


def failure_of(action: Any) -> errors.CommError | None:
    """What ended it, or None."""
    try:
        action()
    except errors.CommError as error:
        return error
    return None


def fields(error: errors.CommError | None) -> dict[str, object]:
    """As the native rank tells of a failure."""
    if error is None:
        return {"ok": True}
    cause = error.cause
    return {
        "ok": False,
        "kind": KIND[type(error)],
        "cause": -1 if cause.rank is None else cause.rank,
        "other": -1 if cause.other_rank is None else cause.other_rank,
        "pid": cause.pid or 0,
        "op": error.op,
        "text": str(error),
    }


KIND = {
    errors.PeerLostError: "peer lost",
    errors.PeerLeftError: "peer left",
    errors.ConnectionLostError: "connection lost",
    errors.CommTimeoutError: "timeout",
    errors.CommAbortedError: "aborted",
    errors.StoreLostError: "store lost",
    errors.MismatchError: "mismatch",
    errors.RendezvousError: "rendezvous failed",
}
_speaking = threading.Lock()


def say(group: str, event: str, **values: object) -> None:
    """One event, a line on stdout; any thread."""
    with _speaking:
        print(json.dumps({"event": event, "group": group, **values}), flush=True)


def now() -> int:
    """The clock of all ranks' time stamps."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def main() -> None:
    """Serve commands until "quit" or the end of stdin."""
    store, heartbeat, transport = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ["TORCHFT_EXT_HEARTBEAT"] = heartbeat
    os.environ["TORCHFT_EXT_LOCAL_SOCKETS"] = "1" if transport == "local" else "0"
    members: dict[str, Member] = {}
    say("", "ready", pid=os.getpid(), incarnation="", addresses=[], liveness_addresses=[])
    for line in sys.stdin:
        words = line.split()
        name = words.pop(0)[1:] if words[0].startswith("@") else ""
        if words[0] == "quit":
            break
        if words[0] == "die":
            os._exit(3)
        member = members.setdefault(name, Member(name, store))
        member.command(words[0], words[1:])
    for member in members.values():
        member.end()


if __name__ == "__main__":
    main()
