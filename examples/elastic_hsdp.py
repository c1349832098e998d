#!/usr/bin/env python3
"""Train a sharded model (FSDP2, HSDP): two replicas of two shards; a worker dies, another comes.

    python examples/elastic_hsdp.py

The replica that lost a worker is parked: its other worker votes on steps, and trains on with the
newcomer, which gets its shard from the replica that is whole. The model is wrapped anew each time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchft_ext import elastic

SHARDS, WORKERS, STEPS = 2, 4, 600


class Training:
    """What is made anew for each view."""

    def __init__(self) -> None:
        self.replicas = elastic.Replicas(SHARDS)

    def build(self, view: elastic.View) -> dict[str, object]:
        """Wrap the model on the mesh of the view; steps() then brings the state there."""
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
        fully_shard(self.model, mesh=self.replicas.mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        return {"model": self.model, "optimizer": self.optimizer}

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def work(address: str, victim: bool) -> None:
    elastic.join(address, size=WORKERS, min_size=1)
    inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))
    training, sampler = Training(), elastic.BatchSampler(inputs, batch_size=32, seed=1)
    state, members = elastic.State(sampler), 0
    for step in elastic.steps(state, STEPS, build=training.build, replicas=training.replicas):
        with step:
            batch = inputs[sampler.indices()]
            loss = nn.functional.mse_loss(training.model(batch), batch.sum(1, keepdim=True))
            loss.backward()
            if victim and step.number == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            step.commit(training.update)
        if step.rank == 0 and members != step.view.size:
            members = step.view.size
            print(f"step {step.number}: {step.size} of {members} members train", flush=True)
    if not state.dirty and step.rank == 0:
        print(f"{state.step} steps done; loss {loss.item():.4f}", flush=True)


def main() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, f"127.0.0.1:{store.port}/hsdp"]
    workers = [subprocess.Popen([*command, str(number)]) for number in range(WORKERS)]
    newcomer = subprocess.Popen([*command, "waits"], stdin=subprocess.PIPE)
    workers.pop().wait()  # it dies
    newcomer.communicate()
    return max(worker.wait() for worker in [*workers, newcomer])


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    torch.set_num_threads(1)
    if sys.argv[2] == "waits":
        sys.stdin.read()
    work(sys.argv[1], victim=sys.argv[2] == str(WORKERS - 1))
