#!/usr/bin/env python3
"""torchft trains with DDP on three replicas; one is killed; the others train on.

pip install torchft==0.2.0
python examples/torchft_ddp.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.utils.store import barrier
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper

from torchft_ext.process_group import ProcessGroupHost

REPLICAS = 3
STEPS = 20
BATCH_S = 0.05  # what a real model's batch takes at least


def main(replica: int, lighthouse: str, start_port: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(10, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupHost(timeout=30.0),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "adam": adam.state_dict()},
        min_replica_size=2,
        init_sync=False,  # the seed makes the replicas equal
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{replica}",
    )
    replicated = DistributedDataParallel(manager, model)
    optimizer = OptimizerWrapper(manager, adam)
    # Two replicas suffice: without this, they could be done before the third has come.
    barrier(dist.TCPStore("127.0.0.1", start_port), REPLICAS, "start", barrier_timeout=60)
    while manager.current_step() < STEPS:
        if replica == 1 and manager.current_step() == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(16, 10)
        time.sleep(BATCH_S)
        optimizer.zero_grad()
        (replicated(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    total = model.weight.sum().item()
    print(
        f"replica {replica}: {STEPS} steps, the last with {manager.num_participants()} replicas; "
        f"the sum of the weights is {total:.6f}"
    )
    manager.shutdown()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
        sys.exit()
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=20_000, heartbeat_timeout_ms=2_000
    )
    start = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(replica), server.address(), str(start.port)]
        )
        for replica in range(REPLICAS)
    ]
    print("exit codes:", [process.wait(120) for process in started])
