"""A Python process among those of mixed_main.cpp, which says the same in C++ and has the usage."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import torchft_ext
from torchft_ext import elastic

LIMIT = timedelta(seconds=100)
SILENCE = timedelta(seconds=1)  # of a member that is left out
STEPS = 60


def store_at(port: str) -> dist.TCPStore:
    """Connect to the store of the test."""
    return dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)


def join(port: str, size: int) -> elastic.Job:
    """Join the job that the C++ processes join."""
    return elastic.join(
        f"127.0.0.1:{port}/mixed", size=size, min_size=1, timeout=LIMIT, limit=SILENCE
    )


class Member:
    """A member of a job."""

    def __init__(
        self, port: str, number: str, founders: str, newcomers: str, ends: str = "", at: str = "-1"
    ) -> None:
        """Join."""
        self.is_new = int(number) >= int(founders)
        self.newcomers = int(newcomers)
        self.ends, self.at = ends, int(at)
        self.store = store_at(port)
        if self.is_new:
            self.store.wait(["founded"], LIMIT)
        self.job = join(port, int(founders))
        self.step = 0
        self.total = torch.zeros(1000, dtype=torch.int64)
        self.sum = self.total

    def run(self) -> None:
        """Count steps until all newcomers are there."""
        self.recover()
        self.store.set("founded", b"1")
        while True:
            ok = self.compute()
            try:
                answer = self.job.agree(ok, b"new" if self.is_new else b"")
            except elastic.LeftOutError:  # it leaves, and the others have decided on a view
                assert self.ends == "leave"
                break
            if answer.ok:
                self.total += self.sum // self.view.size
                self.step += 1
            if self.view.member in answer.leaving:
                break
            if answer.ok and self.step >= STEPS and answer.notes.count(b"new") == self.newcomers:
                break
            if not answer.ok or self.job.is_over() or answer.changes_view:
                self.recover()
        assert self.total.eq(self.step * (self.step + 1) // 2).all(), (self.step, self.total)
        assert self.step >= STEPS or self.ends == "leave"
        self.job.close()

    def recover(self) -> None:
        """Go on in the next view, with the state of its source."""
        while True:
            self.view = self.job.recover()
            try:
                step = torch.tensor([self.step])
                dist.broadcast(step, self.view.source)
                dist.broadcast(self.total, self.view.source)
            except torchft_ext.CommError:  # another member is lost
                continue
            self.step = int(step.item())
            # The same names on all Python members, though C++ members count no groups.
            assert dist.get_pg_count() == self.view.number << 32
            return

    def compute(self) -> bool:
        """Add up a step; return whether that succeeded."""
        time.sleep(0.005)
        if self.ends == "die" and self.step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.ends == "freeze" and self.step == self.at:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.ends == "leave" and self.step == self.at:
            self.job.leave()
        self.sum = torch.full((1000,), self.step + 1)
        began = time.monotonic()
        try:
            dist.all_reduce(self.sum)
        except torchft_ext.CommError as error:
            took = time.monotonic() - began
            assert took < 3 * SILENCE.total_seconds(), f"released after {took} s: {error}"
            return False
        return True


def expect_standstill(port: str, *parts: str) -> None:
    """Go from view to view until that ends in an error with these parts, on one of the members.

    The other one may be alone by then.
    """
    job = join(port, 2)
    for views in range(10):
        ok = True
        try:
            if job.recover().size == 1:
                job.close()
                return
            try:
                dist.all_reduce(torch.ones(3))
            except torchft_ext.CommError:
                ok = False
            assert not job.agree(ok).ok
        except elastic.NoProgressError as error:
            assert all(part in str(error) for part in parts), str(error)
            assert views <= 3, views
            job.close()
            return
    raise AssertionError("the job goes on from view to view")


def expect_sum(group: dist.ProcessGroup) -> None:
    """Add up with the C++ process."""
    tensor = torch.full((5,), group.rank() + 1)
    group.allreduce([tensor]).wait()
    assert tensor.eq(3).all(), tensor


def be_in_one_group(port: str, rank: int) -> None:
    """Be one rank of two in a group, and in another one."""
    store = store_at(port)
    group = torchft_ext.make_group(store, rank, 2, name="mixed", timeout=LIMIT)
    expect_sum(group)
    torchft_ext.backend(group).configure(f"127.0.0.1:{port}/generation2", 1 - rank, 2)
    tensor = torch.full((5,), float(group.rank()))
    dist.broadcast(tensor, group_src=1, group=group)
    assert tensor.eq(1).all(), tensor
    group.shutdown()
    dist.init_process_group("ft", store=dist.HashStore(), rank=0, world_size=1, timeout=LIMIT)
    torchft_ext.backend().configure(f"127.0.0.1:{port}/other", rank, 2)
    expect_sum(dist.group.WORLD)
    dist.destroy_process_group()


def main(what: str, port: str, *words: str) -> None:
    """Do what the first word says."""
    if what == "job":
        Member(port, *words).run()
    elif what == "names":
        expect_standstill(port, "'default'", f"'{words[0]}'")
    elif what == "first":
        expect_standstill(port, "mismatch", "allreduce")
    elif what == "group":
        be_in_one_group(port, int(words[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
