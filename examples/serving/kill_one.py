"""What the programs beside this share: four processes, of which one is killed, and their parent.

A process tells its parent of events by messages on a pipe: "begun" once it has its group (`ours`:
how many backends of torchft_ext are in it), "stepping" after STEPS steps, "ended" (`same`: whether
its group is the object that it was; `size`) after STEPS more.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from types import TracebackType
from typing import Any

import torch.distributed as dist

PROCESSES, KILLED = 4, 2
STEPS = 50  # before the kill, and after the recovery
LIMIT_S = 120.0  # of each wait of the parent

Message = dict[str, Any]


def say(pipe: Connection, event: str, **fields: object) -> None:
    pipe.send({"event": event, **fields})


class Processes:
    """The parent's side. A context manager, which ends them all.

    run: what each process does, with its number and its pipe. The first message from the parent is
    the port of a store on 127.0.0.1.
    """

    def __init__(self, run: Callable[[int, Connection], None]) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        fork = multiprocessing.get_context("fork")
        self._pipes: dict[int, Connection] = {}
        self._processes: list[ForkProcess] = []
        for number in range(PROCESSES):
            self._pipes[number], theirs = fork.Pipe()
            self._processes.append(fork.Process(target=run, args=(number, theirs)))
            self._processes[number].start()
            theirs.close()
        # Its threads would not survive a fork.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.send(self.store.port)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join(30)

    def send(self, message: object) -> None:
        """To all that are left."""
        for pipe in self._pipes.values():
            pipe.send(message)

    def left(self) -> list[int]:
        """The numbers of those that were not killed."""
        return list(self._pipes)

    def gather(self, event: str) -> dict[int, Message]:
        """Wait for this event of all that are left.

        Raises SystemExit where one of them ends first, or none tells of anything in time.
        """
        found: dict[int, Message] = {}
        while len(found) < len(self._pipes):
            missing = {pipe: each for each, pipe in self._pipes.items() if each not in found}
            ready = wait(list(missing), LIMIT_S)
            if not ready:
                sys.exit(f"no '{event}' from processes {sorted(missing.values())}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except EOFError:
                    sys.exit(f"process {missing[pipe]} ended before its '{event}'")
                if message["event"] == event:
                    found[missing[pipe]] = message
        return found

    def kill_one(self) -> tuple[int, float]:
        """Kill one once all step. Returns its process id, and when, by time.monotonic()."""
        begun = self.gather("begun").values()
        print("groups of torchft_ext:", all(each["ours"] == 1 for each in begun))
        self.gather("stepping")
        killed = time.monotonic()
        self._processes[KILLED].kill()
        self._pipes.pop(KILLED).close()
        return self._processes[KILLED].pid or 0, killed

    def print_ends(self) -> None:
        """Wait until all that are left have ended, and print what they have then."""
        for number, message in self.gather("ended").items():
            print(f"{number}: same group: {message['same']}, members: {message['size']}")
