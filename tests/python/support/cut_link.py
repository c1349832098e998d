"""A program for namespaces.py: three hosts on a bridge, with trouble between two of them.

Two members train on the first hosts. A process on the third has trouble to reach the second one.
Run with arguments it is one of these processes: ADDRESS REPORT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

FOUNDERS = (0, 1)
LIMIT = 60.0  # seconds
WATCHED_S = 2.0
CUT_S = 4.0  # and up again for as long
STEP_S = 0.005
FLAPS = 4
WHOLE_MTU, SMALL_MTU = 1500, 576  # bytes
UNREACHED = "bytes get through to"  # what the process on the third host says


def train(report: Path) -> Callable[..., None]:
    """A loop that writes after each step how many this member has made, in which view."""
    import torch
    import torch.distributed as dist

    import torchft_ext

    unfinished = report.with_suffix(".unfinished")

    def loop(job) -> None:
        view = job.recover()
        steps = 0
        while True:
            try:
                time.sleep(STEP_S)
                dist.all_reduce(torch.ones(3))
                answer = job.agree(True)
                steps += answer.ok
                over = not answer.ok or answer.changes_view or job.is_over()
            except torchft_ext.CommError:
                over = True
            unfinished.write_text(json.dumps([steps, view.number, view.size]))
            unfinished.replace(report)
            if over:
                view = job.recover()

    return loop


def be_member(address: str, report: Path) -> None:
    from torchft_ext import elastic

    second = timedelta(seconds=1)
    elastic.run(
        train(report), address, size=len(FOUNDERS), min_size=1, limit=second, timeout=LIMIT * second
    )


class Hosts:
    """The processes, each on a host of its own, and what they write."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "soak"))
        import soak_network

        self.network = soak_network.Network()
        self._folder = folder
        serve = ["-m", "torchft_ext.elastic", "--host", soak_network.STORE_ADDRESS, "--port", "0"]
        self._all = [self._start([sys.executable, *serve], stdout=subprocess.PIPE, text=True)]
        assert self._all[0].stdout is not None
        port = self._all[0].stdout.readline().split("port ")[1].split(";")[0]
        self._address = f"{soak_network.STORE_ADDRESS}:{int(port)}/cut"
        self._on = {host: self.network.command(host) for host in (*FOUNDERS, 2)}
        for host in self._on:
            self.network.send_single_packets(host)

    def _start(self, command: list[str], **options: object) -> subprocess.Popen:
        return subprocess.Popen(command, **options)

    def _report(self, host: int) -> Path:
        return self._folder / f"report{host}"

    def begin(self, host: int) -> None:
        command = [sys.executable, __file__, self._address, str(self._report(host))]
        log = (self._folder / f"log{host}").open("w")
        self._all.append(self._start([*self._on[host], *command], stderr=log))

    def log(self, host: int) -> str:
        return (self._folder / f"log{host}").read_text()

    def read(self, host: int) -> tuple[int, int, int]:
        """Steps, and the number and size of the view; zeros before the first step."""
        try:
            steps, view, size = json.loads(self._report(host).read_text())
        except FileNotFoundError:
            return (0, 0, 0)
        return steps, view, size

    def await_size(self, host: int, size: int) -> None:
        until = time.monotonic() + LIMIT
        while self.read(host)[2] != size:
            if time.monotonic() > until:
                raise TimeoutError(f"no view of {size}; host {host} says\n{self.log(host)}")
            time.sleep(0.02)

    def await_log(self, host: int, text: str) -> None:
        until = time.monotonic() + LIMIT
        while text not in self.log(host):
            if time.monotonic() > until:
                raise TimeoutError(f"host {host} says\n{self.log(host)}\nand not {text!r}")
            time.sleep(0.02)

    def watch(self, host: int, seconds: float) -> tuple[float, int]:
        """Return steps in a second, the median of tenths of the time; and how many views began."""
        before = self.read(host)[1]
        rates = []
        for _ in range(10):
            first, began = self.read(host)[0], time.monotonic()
            time.sleep(seconds / 10)
            rates.append((self.read(host)[0] - first) / (time.monotonic() - began))
        return sorted(rates)[len(rates) // 2], self.read(host)[1] - before

    def end(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()


def disturb(hosts: Hosts, trouble: str, *, disturbed: bool = True) -> None:
    """Have that trouble between the second member and the newcomer, or end it."""
    network = hosts.network
    if trouble == "no way":
        network.cut_pair((1, 2), cut=disturbed)
    elif trouble == "no way there":
        network.cut_way(2, 1, cut=disturbed)
    elif trouble == "no way back":
        network.cut_way(1, 2, cut=disturbed)
    elif trouble == "firewall":
        network.refuse(2, 1, refused=disturbed)
    elif trouble == "small packets":
        network.shrink(2, SMALL_MTU if disturbed else WHOLE_MTU)


def newcomer(hosts: Hosts, trouble: str) -> dict:
    """A process comes that cannot reach the second member until the trouble ends."""
    undisturbed, _ = hosts.watch(0, WATCHED_S)
    first = hosts.read(0)[1]
    disturb(hosts, trouble)
    hosts.begin(2)
    hosts.await_log(2, UNREACHED)
    disturbed, _ = hosts.watch(0, WATCHED_S)
    _, last, size = hosts.read(0)
    disturb(hosts, trouble, disturbed=False)
    hosts.await_size(0, 3)
    return {
        "undisturbed": undisturbed,
        "disturbed": disturbed,
        "views": last - first,
        "size": size,
    }


def flapping(hosts: Hosts) -> dict:
    """The link between two of three members breaks, comes back, and breaks again."""
    hosts.begin(2)
    hosts.await_size(0, 3)
    undisturbed, _ = hosts.watch(0, WATCHED_S)
    rates = []
    for _ in range(FLAPS):
        before = hosts.read(0)[1]
        hosts.network.cut_pair((1, 2))
        rates.append(hosts.watch(0, CUT_S)[0])
        hosts.network.cut_pair((1, 2), cut=False)
        rates.append(hosts.watch(0, CUT_S)[0])
    return {
        "undisturbed": undisturbed,
        "disturbed": sorted(rates)[len(rates) // 2],
        "views": hosts.read(0)[1] - before,  # of the last time
        "size": hosts.read(0)[2],
    }


def main(folder: Path, trouble: str) -> dict:
    hosts = Hosts(folder)
    try:
        for host in FOUNDERS:
            hosts.begin(host)
        hosts.await_size(0, 2)
        return flapping(hosts) if trouble == "flapping" else newcomer(hosts, trouble)
    finally:
        hosts.end()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    be_member(sys.argv[1], Path(sys.argv[2]))
