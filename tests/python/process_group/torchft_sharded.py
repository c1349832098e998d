"""One shard of a replica of several ranks: FSDP2 inside it, torchft's Managers across replicas."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
import torchft.process_group as theirs
from rankside import leave_default_group, wait_until
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchft.checkpointing import HTTPTransport
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft_replica import GROUPS, LIMIT, STEPS_TOGETHER, Job, Outcome, done, loss, made

from torchft_ext import process_group as ours

SHARDS = 2


def store_of(job: Job, name: str, shard: int) -> tuple[dist.TCPStore, int]:
    """The replica's, which its first shard serves, and its port."""
    gates = job.store()
    if shard == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        gates.set(f"port/{name}", str(server.port))
        return server, server.port
    port = int(gates.get(f"port/{name}"))
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT), port


class Shard:
    """Its part of the model, and its Manager."""

    def __init__(self, job: Job, name: str, shard: int, die_at: int | None) -> None:
        self.gates = job.store()
        self.die_at = die_at
        self.healed = False
        store, port = store_of(job, name, shard)
        inner = dist.PrefixStore("shards", store)
        dist.init_process_group("ft", store=inner, rank=shard, world_size=SHARDS, timeout=LIMIT)
        self.model, _ = made("fsdp")
        fully_shard(self.model, mesh=init_device_mesh("cpu", (SHARDS,)))
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.group = GROUPS[job.group](timeout=LIMIT)
        self.manager = Manager(
            pg=self.group,
            load_state_dict=self.load,
            state_dict=self.state,
            min_replica_size=1,
            init_sync=False,
            timeout=LIMIT,
            quorum_timeout=LIMIT,
            connect_timeout=LIMIT,
            rank=shard,
            world_size=SHARDS,
            store_addr="127.0.0.1",
            store_port=port,
            lighthouse_addr=job.lighthouse,
            replica_id=name,
            checkpoint_transport=HTTPTransport(timeout=LIMIT, num_chunks=0),
        )
        managing = theirs if job.group.startswith("torchft.") else ours
        self.across = managing.ManagedProcessGroup(self.manager)
        assert isinstance(self.model, FSDPModule)
        self.model.set_all_reduce_hook(self.average)

    def average(self, gradient: torch.Tensor) -> None:
        """Of this shard, across replicas."""
        if self.manager.current_step() == self.die_at:
            self.manager.wait_quorum()  # the others have begun the step with this replica
            self.gates.add("dying", 1)  # the first shard serves the other's quorum
            await_all(self.gates, "dying", SHARDS)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(gradient, dist.ReduceOp.AVG, group=self.across)

    def local(self) -> list[torch.Tensor]:
        return [one.to_local() for one in self.model.parameters()]

    def state(self) -> dict[str, object]:
        return {"weights": self.local()}

    def load(self, state: dict) -> None:
        with torch.no_grad():
            for mine, healed in zip(self.local(), state["weights"], strict=True):
                mine.copy_(healed)
        self.healed = True

    def outcome(self, failed: int) -> Outcome:
        weights = torch.cat([one.full_tensor().flatten() for one in self.model.parameters()])
        step = self.manager.current_step()
        return Outcome(step, step, weights.tolist(), failed, self.healed)

    def close(self) -> None:
        self.manager.shutdown()
        self.group.shutdown()
        leave_default_group()


def await_all(gates: dist.Store, which: str, count: int) -> None:
    wait_until(lambda: gates.add(which, 0) == count, f"{count} shards that are {which}")


def train_sharded(
    job: Job, name: str, shard: int, die_at: int | None = None, newcomer: bool = False
) -> Outcome:
    """Train as a shard until all are done; `die_at`: this process dies within that step."""
    leave_default_group()
    member = Shard(job, name, shard, die_at)
    gates = member.gates
    optimizer = OptimizerWrapper(member.manager, member.sgd)
    gates.add("newcomers" if newcomer else "here", 1)
    if not newcomer:
        await_all(gates, "here", SHARDS * job.replicas)
    failed = 0
    while not done(job, gates, member.manager.current_step()):
        before = member.manager.current_step()
        if before == job.wait_at:
            await_all(gates, "newcomers", SHARDS)
        optimizer.zero_grad()
        loss(member.model, before).backward()
        optimizer.step()
        failed += member.manager.current_step() == before
        if newcomer and shard == 0 and member.healed and not gates.check(["last"]):
            gates.set("last", str(member.manager.current_step() + STEPS_TOGETHER))
    outcome = member.outcome(failed)
    member.close()
    return outcome
