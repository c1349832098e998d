#!/usr/bin/env python3
"""Train with FSDP2 on two replicas of two shards; one process is killed; one replica trains on.

    python examples/fsdp.py FOLDER      FOLDER: for checkpoints

FSDP2 cuts parameters for one number of shards when it wraps a model. So the survivors keep that
number, build mesh and model anew, and load the last checkpoint. A whole replica must be left.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import start
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launcher_membership import Membership, await_newer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchft_ext

SHARDS = 2
STEPS = 20
EVERY = 5  # steps between checkpoints
PATIENCE_S = 30.0
FOLDER = "CHECKPOINTS"  # of the environment, for the copies


class Training:
    """Model and optimizer on the group's present members, at the last checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shape = (dist.get_world_size() // SHARDS, SHARDS)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.steps = self._load()

    def step(self) -> None:
        inputs = torch.randn(16, 10)
        self.optimizer.zero_grad()
        (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        self.optimizer.step()
        self.steps += 1

    def save(self) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.save(state, checkpoint_id=self.folder / str(self.steps))

    def abort(self) -> None:
        """Release members that wait for this one in a group which has lost nobody."""
        for group in self.mesh.get_all_groups():
            torchft_ext.backend(group).abort("the training begins anew")

    def _load(self) -> int:
        # A checkpoint is whole once its .metadata is there. Rank 0 looks; all take its answer.
        found = [
            max((int(path.parent.name) for path in self.folder.glob("*/.metadata")), default=0)
        ]
        dist.broadcast_object_list(found, 0)
        if found[0] > 0:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state: dict[str, Any] = {"model": model, "optimizer": optimizer}
            dcp.load(state, checkpoint_id=self.folder / str(found[0]))
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        return found[0]


def main() -> None:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False)
    dist.init_process_group("ft", timeout=timedelta(seconds=30))
    me = rank = dist.get_rank()
    members = Membership.first(dist.get_world_size())
    training = Training(Path(os.environ[FOLDER]))
    while training.steps < STEPS:
        try:
            if me == 2 and training.steps == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            training.step()
            if training.steps % EVERY == 0:
                training.save()
        except torchft_ext.CommError as error:
            print(f"worker {me}, step {training.steps}: {error}", flush=True)
            training.abort()
            members, rank = await_newer(store, members, rank, PATIENCE_S)
            size = members.world // SHARDS * SHARDS
            if rank >= size:
                print(f"worker {me}: not needed for whole replicas", flush=True)
                return
            torchft_ext.backend().configure(f"{host}:{port}/{members.prefix}", rank, size)
            training = Training(training.folder)
            print(f"worker {me}: rank {rank} of {size}, from step {training.steps}", flush=True)
    if dist.get_rank() == 0:
        print(f"{training.steps} steps done by {dist.get_world_size()} members")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        with tempfile.TemporaryDirectory() as scratch:
            os.environ[FOLDER] = sys.argv[1] if len(sys.argv) > 1 else scratch
            sys.exit(start.copies_of(__file__, 4))
