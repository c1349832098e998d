#!/usr/bin/env python3
"""torchtitan's fault-tolerant parts: one of two replicas is killed, starts again, and is healed.

pip install torchft==0.2.0 torchtitan==0.3.0
python examples/frameworks/torchtitan_replicas.py

Each replica has two shards. Real: torchtitan's TorchFTManager, its optimizer container and its hook
in FSDP2's all-reduce; torchft's Managers and lighthouse. torchtitan's trainer wants a GPU, so the
loop is this program's own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchft.coordination import LighthouseServer
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.experiments.torchft import TorchFTManager
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer

from torchft_ext.process_group import ProcessGroupHost

REPLICAS, SHARDS = 2, 2
KILLED, KILL_AT = 1, 10  # this replica, in this step
TOGETHER = 20  # steps in a row that both replicas take, before the end
LIMIT_S = 300


def sharded_model() -> nn.Module:
    """The same on all shards of a replica; the first quorum makes the replicas equal."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    mesh = init_device_mesh("cpu", (SHARDS,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def optimizers_of(model: nn.Module, manager: TorchFTManager) -> TorchFTOptimizersContainer:
    group = ParamGroupConfig(
        pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01, "weight_decay": 0.0}
    )
    config = TorchFTOptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    return config.build(model_parts=[model], ft_manager=manager)


class Shard:
    """One process of a replica."""

    def __init__(self, replica: int) -> None:
        self.store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.rank = int(os.environ["RANK"])
        dist.init_process_group("ft", store=self.store, rank=self.rank, world_size=SHARDS)
        torchft.ProcessGroupGloo = ProcessGroupHost  # torchtitan makes a group of that name
        self.titan = TorchFTManager.Config(
            enable=True, process_group="gloo", replica_id=replica, group_size=REPLICAS
        ).build()
        self.manager = self.titan.manager
        torch.manual_seed(replica)
        self.model = sharded_model()
        self.titan.maybe_set_all_reduce_hook([self.model])
        self.optimizers = optimizers_of(self.model, self.titan)
        self.optimizers.init_cache_state_dict()
        # Taken once: FSDP2 reshards the model in this call, and torchft asks on another thread.
        self.parameters = self.model.state_dict()
        self.healed_at: int | None = None
        self.manager.register_state_dict_fn("shard", self.load, self.state)
        self.name = f"replica {replica}, shard {self.rank}"

    def state(self) -> dict[str, Any]:
        return {"model": self.parameters, "optimizers": self.optimizers.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.healed_at = self.manager.current_step()

    def step(self, die: bool) -> int:
        """Take a step. Returns how many replicas took it; 0: it was not committed."""
        before = self.manager.current_step()
        self.optimizers.zero_grad()  # begins a quorum
        if die:
            self.manager.wait_quorum()  # the other replica has begun the step with this one
            self.store.set(f"dies/{self.rank}", "")
            signal.pause()  # until the parent kills this process
        inputs = torch.randn(8, 16)
        (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        failure = self.manager.errored()
        if failure is not None:
            error = failure.original_exception
            print(f"{self.name}: step {before}: {type(error).__name__}: {error}", flush=True)
        self.optimizers.step()  # if all agree that nothing failed
        committed = self.manager.current_step() > before
        return int(self.manager.num_participants()) if committed else 0

    def weights(self) -> float:
        parameters = [one for one in self.model.parameters() if isinstance(one, DTensor)]
        return sum(one.full_tensor().double().sum().item() for one in parameters)


def train(replica: int, dies: bool) -> None:
    shard, together = Shard(replica), 0
    while together < TOGETHER:
        die = dies and shard.manager.current_step() == KILL_AT
        together = together + 1 if shard.step(die) == REPLICAS else 0
    print(
        f"{shard.name}: {shard.manager.current_step()} steps, the state of another replica came "
        f"at {shard.healed_at}; the sum of the weights is {shard.weights():.6f}",
        flush=True,
    )
    shard.manager.shutdown()
    dist.destroy_process_group()


class Replica:
    """The parent's side: a replica's processes, and the store that they meet in."""

    def __init__(self, number: int, lighthouse: str, dies: bool) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._shards = [
            subprocess.Popen(
                [sys.executable, __file__, str(number), str(dies)],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self._store.port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(SHARDS),
                    "TORCHFT_LIGHTHOUSE": lighthouse,
                },
            )
            for rank in range(SHARDS)
        ]

    def kill_in_step(self) -> None:
        """Kill all shards in the step in which they say that they die."""
        limit = timedelta(seconds=LIMIT_S)
        self._store.wait([f"dies/{rank}" for rank in range(SHARDS)], limit)
        self.kill()

    def wait(self) -> list[int]:
        """Return the exit codes."""
        return [shard.wait(LIMIT_S) for shard in self._shards]

    def kill(self) -> None:
        """End what still runs."""
        for shard in self._shards:
            shard.kill()


def main() -> None:
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=2_000
    )
    replicas = [Replica(each, server.address(), each == KILLED) for each in range(REPLICAS)]
    try:
        replicas[KILLED].kill_in_step()
        replicas[KILLED] = Replica(KILLED, server.address(), dies=False)
        print("exit codes:", [replica.wait() for replica in replicas])
    finally:
        for replica in replicas:
            replica.kill()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(int(sys.argv[1]), sys.argv[2] == "True")
        sys.exit()
    main()
