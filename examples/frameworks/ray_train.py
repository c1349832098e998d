#!/usr/bin/env python3
"""Ray Train: TorchConfig takes the backend's name. One of two workers is killed.

pip install "ray[train]==2.60.0"
python examples/frameworks/ray_train.py

First a run that may not be repeated: what fit() raises. Then one that may: Ray starts both workers
anew, and they continue from the last checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

WORKERS, STEPS = 2, 40
KILL_AT, CHECKPOINT_EVERY = 25, 10


def train() -> None:
    """What each worker does."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(rank)
    model = prepare_model(nn.Linear(10, 1))  # DDP
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    begun = load(model, adam)
    for step in range(begun, STEPS):
        if begun == 0 and step == KILL_AT and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(16, 10)
        adam.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        adam.step()
        if (step + 1) % CHECKPOINT_EVERY == 0:
            report(model, adam, begun, step + 1)


def load(model: nn.Module, adam: torch.optim.Optimizer) -> int:
    """Continue from a checkpoint, if there is one. Returns the number of steps taken."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / "state.pt")
    model.load_state_dict(state["model"])
    adam.load_state_dict(state["adam"])
    return int(state["steps"])


def report(model: nn.Module, adam: torch.optim.Optimizer, begun: int, steps: int) -> None:
    """Tell Ray, with a checkpoint from rank 0. All workers call it."""
    metrics = {"backend": dist.get_backend(), "begun_at": begun, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": model.state_dict(), "adam": adam.state_dict(), "steps": steps}
        torch.save(state, Path(folder) / "state.pt")
        checkpoint = Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None
        ray.train.report(metrics, checkpoint=checkpoint)


def fit(backend: str, folder: str, retries: int) -> ray.train.Result:
    trainer = TorchTrainer(
        train,
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name=f"retries{retries}",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=retries),
        ),
    )
    return trainer.fit()


def main(backend: str) -> None:
    ray.init(num_cpus=WORKERS, include_dashboard=False, object_store_memory=100 * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        try:
            fit(backend, folder, retries=0)
        except ray.train.WorkerGroupError as error:
            for rank, failure in sorted(error.worker_failures.items()):
                print(f"worker {rank}: {type(failure).__name__}: {failure}")
        metrics = fit(backend, folder, retries=1).metrics
    assert metrics is not None
    print(
        f"backend {metrics['backend']}: {metrics['steps']} steps, "
        f"the last {metrics['steps'] - metrics['begun_at']} by the second workers"
    )
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "ft")
