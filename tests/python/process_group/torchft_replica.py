"""One replica of a job that torchft manages: what test_torchft.py runs in its rank processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torchft.process_group as theirs
from rankside import OPERATION_LIMIT, connected_store, kept, leave_default_group
from torch import nn
from torchft.checkpointing import CheckpointTransport, HTTPTransport
from torchft.checkpointing.pg_transport import PGTransport
from torchft.ddp import DistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD, _StreamingDiLoCoFragment
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.parameter_server import ParameterServer

import torchft_ext
from torchft_ext import process_group as ours

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
from bench_managers import make_manager


def swallowing(timeout: timedelta) -> ours.ProcessGroup:
    return ours.ErrorSwallowingProcessGroupWrapper(ours.ProcessGroupHost(timeout))


GROUPS = {
    "torchft.Gloo": theirs.ProcessGroupGloo,
    "Host": ours.ProcessGroupHost,
    "Gloo": ours.ProcessGroupGloo,
    "BabyHost": ours.ProcessGroupBabyHost,
    "BabyGloo": ours.ProcessGroupBabyGloo,
    "swallowing Host": swallowing,
}
LIMIT = timedelta(seconds=OPERATION_LIMIT)
SYNC_EVERY = 2  # batches between two averages of LocalSGD and DiLoCo
STEPS_TOGETHER = 3  # that all take after a newcomer's first one


@dataclass(frozen=True)
class Job:
    """What all replicas of one job know."""

    lighthouse: str
    gates: str  # the address under which replicas wait for one another
    group: str  # of GROUPS
    kind: str = "ddp"
    transport: str = "http"
    replicas: int = 3
    wait_at: int | None = None  # the step before which all wait for a newcomer
    last: int | None = None  # the step to end at; None: a newcomer says

    def store(self) -> dist.Store:
        return connected_store(self.gates)


@dataclass(frozen=True)
class Outcome:
    step: int  # commits
    batches: int  # that the model has seen
    weights: list[float]
    failed: int  # steps that were not committed
    healed: bool


def made(kind: str) -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(1)
    model = nn.Linear(4, 2, dtype=torch.float64)
    if kind == "streaming":  # in two fragments
        model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), model)
    momentum = 0.5 if kind in ("ddp", "local_sgd") else 0.0  # DiLoCo does not restore it
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def loss(model: nn.Module, number: int) -> torch.Tensor:
    """Of a batch that every replica has, so that who takes part makes no difference."""
    batch = torch.Generator().manual_seed(number)
    inputs = torch.randn(8, 4, dtype=torch.float64, generator=batch)
    wanted = torch.randn(8, 2, dtype=torch.float64, generator=batch)
    return (model(inputs) - wanted).square().mean()


class Replica:
    """A model, its optimizer and its Manager."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.batches = 0
        self.model, self.sgd = made(job.kind)
        self.group = GROUPS[job.group](timeout=LIMIT)
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.healed = False
        self.fragments: list[_StreamingDiLoCoFragment] = []  # of streaming

    def managed_as(self, number: int) -> Manager:
        self.manager = make_manager(
            self.group,
            self.server,
            self.job.lighthouse,
            f"replica{number}",
            load_state_dict=self.load,
            state_dict=self.state,
            use_async_quorum=self.job.kind == "ddp",
            timeout=LIMIT,
            quorum_timeout=LIMIT,
            connect_timeout=LIMIT,
            checkpoint_transport=self.transport(),
        )
        return self.manager

    def transport(self) -> CheckpointTransport:
        if self.job.transport == "http":
            return HTTPTransport(timeout=LIMIT, num_chunks=0)
        return PGTransport(self.group, LIMIT, torch.device("cpu"))

    def state(self) -> dict[str, object]:
        sgd = self.sgd.state_dict()
        return {"model": self.model.state_dict(), "sgd": sgd, "batches": self.batches}

    def load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.sgd.load_state_dict(state["sgd"])
        self.batches = state["batches"]
        self.healed = True

    def outcome(self, failed: int) -> Outcome:
        # Of fragments those that are averaged: between two sums each replica has its own.
        averaged = [one for each in self.fragments for one in each.original_parameters.values()]
        parameters = averaged or list(self.model.parameters())
        weights = torch.cat([one.detach().flatten() for one in parameters]).tolist()
        step = self.manager.current_step()
        return Outcome(step, self.batches, weights, failed, self.healed)

    def die(self, _gradient: torch.Tensor) -> None:
        if self.job.kind == "ddp":
            self.manager.wait_quorum()  # the others have begun the step with this replica
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self.manager.shutdown()
        self.group.shutdown()


def weights_without_torchft(batches: int, kind: str = "local_sgd") -> list[float]:
    """Of a model that has seen so many batches, one after the other."""
    model, sgd = made(kind)
    for number in range(batches):
        sgd.zero_grad()
        loss(model, number).backward()
        sgd.step()
    return torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()


def ddp(replica: Replica) -> Callable[[], None]:
    """Returns what takes one step."""
    model = DistributedDataParallel(replica.manager, replica.model)
    optimizer = OptimizerWrapper(replica.manager, replica.sgd)

    def step() -> None:
        optimizer.zero_grad()
        loss(model, replica.manager.current_step()).backward()
        before = replica.manager.current_step()
        optimizer.step()
        replica.batches += replica.manager.current_step() - before

    return step


def local_sgd(replica: Replica) -> Callable[[], None]:
    """LocalSGD keeps its batches where a sync failed."""
    return averaging(replica, LocalSGD(replica.manager, replica.model, replica.sgd, SYNC_EVERY))


def diloco(replica: Replica) -> Callable[[], None]:
    """DiLoCo goes back to the last sync where one failed: the same batches come again."""
    outer = torch.optim.SGD(replica.model.parameters(), lr=0.5, momentum=0.5, nesterov=True)
    made = DiLoCo(replica.manager, [replica.model], replica.sgd, outer, SYNC_EVERY)
    return averaging(replica, made)


def streaming(replica: Replica) -> Callable[[], None]:
    """DiLoCo that averages one fragment at a time, while the next batch is under way."""
    fragments = list(replica.model)
    outer = [torch.optim.SGD(one.parameters(), lr=0.5) for one in fragments]
    interval = SYNC_EVERY * len(fragments)
    made = DiLoCo(replica.manager, fragments, replica.sgd, outer, interval, fragment_sync_delay=1)
    replica.fragments = made._fragments
    return averaging(replica, made)


def averaging(replica: Replica, method: LocalSGD | DiLoCo) -> Callable[[], None]:
    method.__enter__()

    def step() -> None:
        first = replica.manager.current_step() * SYNC_EVERY
        for number in range(SYNC_EVERY):
            replica.sgd.zero_grad()
            chosen = replica.batches if replica.job.kind == "local_sgd" else first + number
            loss(replica.model, chosen).backward()
            replica.batches += 1
            replica.sgd.step()

    return step


def train(job: Job, number: int, die_at: int | None = None, newcomer: bool = False) -> Outcome:
    """Train as one replica until all are done; `die_at`: this process dies within that step."""
    leave_default_group()
    gates = job.store()
    replica = Replica(job)
    manager = replica.managed_as(number)
    step = {"ddp": ddp, "local_sgd": local_sgd, "diloco": diloco, "streaming": streaming}[job.kind](
        replica
    )
    gates.set("newcomer" if newcomer else f"here{number}", "")
    if not newcomer:
        gates.wait([f"here{other}" for other in range(job.replicas)], LIMIT)
    failed = 0
    while not done(job, gates, manager.current_step()):
        if manager.current_step() == job.wait_at:
            gates.wait(["newcomer"], LIMIT)
        if manager.current_step() == die_at:
            next(replica.model.parameters()).register_hook(replica.die)
        before = manager.current_step()
        step()
        failed += manager.current_step() == before
        if newcomer and replica.healed and not gates.check(["last"]):
            gates.set("last", str(manager.current_step() + STEPS_TOGETHER))
    outcome = replica.outcome(failed)
    replica.close()
    return outcome


def done(job: Job, gates: dist.Store, step: int) -> bool:
    if job.last is not None:
        return step >= job.last
    return gates.check(["last"]) and step >= int(gates.get("last"))


class Doubling(ParameterServer):
    """Sends each tensor back, doubled, until its client goes."""

    @classmethod
    def new_process_group(cls) -> ours.ProcessGroup:
        return ours.ProcessGroupHost(timeout=LIMIT)

    def forward(self, session_id: str, pg: ours.ProcessGroup) -> None:
        kept.setdefault("sessions", []).append(session_id)
        with suppress(torchft_ext.CommError):
            while True:
                tensor = torch.empty(2)
                pg.recv([tensor], 1, 0).wait()
                pg.send([tensor * 2], 1, 0).wait()


def serve() -> str:
    leave_default_group()
    kept["server"] = Doubling(port=0)
    return kept["server"].address()


def doubled(address: str) -> list[float]:
    """In a session that stays open."""
    leave_default_group()
    kept["session"] = session = Doubling.new_session(address)
    tensor = torch.tensor([1.0, 2.0])
    session.send([tensor], 0, 0).wait()
    session.recv([tensor], 0, 0).wait()
    return tensor.tolist()


def sessions() -> int:
    return len(kept["sessions"])
