"""What a process of the soak does: trains as a member of a job, again and again, until told."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tasks import thread_names
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from torchft_ext import _C, elastic

SAMPLES = 1000
BATCH = 4
DIGEST_EVERY = 25  # steps
LIMIT = timedelta(seconds=1)  # a member silent for so long is left out
BACKOFF = timedelta(seconds=2)  # a minute, as in earnest, would be most of a short soak
TIMEOUT = timedelta(seconds=80)
STEP_TIMEOUT = timedelta(seconds=2)  # a member whose program hangs for so long is left out


@dataclass
class Record:
    """What one process has seen."""

    lives: int = 0  # how often it has joined
    left_out: int = 0
    stranded: bool = False  # left out after the store's end: nowhere to join again
    views: list[tuple[int, int]] = field(default_factory=list)  # number, size
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)  # step: cursor, world size
    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # by steps done and shard
    slowest_step_s: float = 0.0


record = Record()
stopping = threading.Event()
goes_on = threading.Event()  # not set: the program hangs in its next step
goes_on.set()


def live(address: str, size: int, rule: str, shards: int) -> Record:
    """Be a member until stop() is called; join again when left out."""
    stopping.clear()
    record.__init__()  # type: ignore[misc]
    while not stopping.is_set():
        record.lives += 1
        try:
            train(address, size, rule, shards)
            return record
        except elastic.LeftOutError:
            record.left_out += 1
        except elastic.StateLostError:
            if stopping.is_set():  # others have left first, with their shards
                return record
            raise
        except elastic.ElasticError as error:
            lost = type(error) in (elastic.ElasticError, elastic.ElasticTimeoutError)
            if not lost or store_runs(address):
                raise
            record.stranded = True
            return record
    return record


def store_runs(address: str) -> bool:
    host, port = address.split("/")[0].split(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        return False
    return True


class Training:
    """A model by DDP, or in shards; the latter is wrapped anew for each view."""

    def __init__(self, shards: int) -> None:
        self.replicas = None if shards == 1 else elastic.Replicas(shards)
        self.sampler = elastic.BatchSampler(SAMPLES, BATCH, seed=1)
        self.state = elastic.State(self.sampler)
        if self.replicas is None:
            self._wrap(DDP(net()))
            self.state.put(**self._made())

    def build(self, view: elastic.View) -> dict[str, Any]:
        if self.replicas is None:
            return {}
        model = net()
        fully_shard(model, mesh=self.replicas.mesh)
        self._wrap(model)
        return self._made()

    def _made(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def _wrap(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: 1.0 / (1.0 + 0.001 * done)
        )

    def backward(self, inputs: torch.Tensor) -> None:
        """In two parts; DDP sums over members with the second."""
        first, second = inputs.chunk(2)
        with self.model.no_sync() if isinstance(self.model, DDP) else nullcontext():
            (self.model(first).square().mean() / 2).backward()
        (self.model(second).square().mean() / 2).backward()

    def update(self) -> None:
        if self.replicas is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 100.0)  # communicates
        self.optimizer.step()
        self.scheduler.step()

    @property
    def shard(self) -> int:
        place = None if self.replicas is None else self.replicas.place
        return 0 if place is None else place.shard


setattr(  # noqa: B010 - a static method
    _C._ElasticJob, "join", staticmethod(partial(_C._ElasticJob.join, backoff=BACKOFF))
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def train(address: str, size: int, rule: str, shards: int) -> None:
    job = elastic.join(address, size=size, min_size=1, rule=rule, limit=LIMIT, timeout=TIMEOUT)
    try:
        inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
        training = Training(shards)
        state, sampler = training.state, training.sampler
        began = time.monotonic()
        options: dict[str, Any] = {
            "build": training.build,
            "replicas": training.replicas,
            "step_timeout": STEP_TIMEOUT,
        }
        for step in elastic.steps(state, total=10**9, job=job, **options):
            with step:
                batch = sampler.indices()
                cursor = sampler.position
                training.backward(inputs[batch])
                goes_on.wait()
                step.commit(training.update)
            if step.committed and not state.dirty:
                note(step, cursor, training, time.monotonic() - began)
                began = time.monotonic()
            if stopping.is_set():
                job.leave()
    finally:
        job.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.distributed_c10d._world.group_count = 0


def note(step: elastic.Step, cursor: int, training: Training, seconds: float) -> None:
    record.steps[step.number] = (cursor, step.size)
    record.slowest_step_s = max(record.slowest_step_s, seconds)
    if not record.views or record.views[-1][0] != step.view.number:
        record.views.append((step.view.number, step.view.size))
    done = training.state.step
    if done % DIGEST_EVERY == 0:
        record.digests[done, training.shard] = str(training.state.digest())


def so_far() -> tuple[int, int, int]:
    """Steps, the last view's number and its size."""
    number, size = record.views[-1] if record.views else (0, 0)
    return max(record.steps, default=-1) + 1, number, size


def stop() -> None:
    stopping.set()


def hang() -> None:
    goes_on.clear()


def go_on() -> None:
    goes_on.set()


def usage() -> dict[str, Any]:
    """Threads, by name, descriptors and resident bytes of this process."""
    threads = sorted(thread_names().values())
    descriptors = len(os.listdir("/proc/self/fd"))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": threads,
        "descriptors": descriptors,
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
    }
