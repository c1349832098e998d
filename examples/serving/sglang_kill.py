#!/usr/bin/env python3
"""SGLang: four ranks step together, one is killed, the others go on in the same group.

    TORCHFT_EXT_REPLACE_GLOO=1 python examples/serving/sglang_kill.py

Real: SGLang's groups (its GroupCoordinator), its step's exchange, its barrier after loading, its
plugin loading. There is no model and no scheduler. SGLang itself does not go on after an error: its
scheduler ends the server. What follows the kill here is this program's own.
"""

from __future__ import annotations

import datetime
import time
from multiprocessing.connection import Connection

import sglang_step
import torch
import torch.distributed as dist
from kill_one import PROCESSES, STEPS, Processes, say
from sglang.srt.distributed import parallel_state
from sglang.srt.plugins import load_plugins

import torchft_ext

ROW = 8  # numbers of a rank in a step


class Rank:
    """One process of the server."""

    def __init__(self, rank: int, port: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
        self.coordinator = parallel_state.GroupCoordinator(
            group_ranks=[list(range(PROCESSES))],
            local_rank=0,
            torch_distributed_backend="gloo",
            use_pynccl=False,
            use_mscclpp=False,
            use_custom_allreduce=False,
            use_torch_symm_mem_all_reduce=False,
            use_hpu_communicator=False,
            use_xpu_communicator=False,
            group_name="tp",
        )
        self.group = self.coordinator.cpu_group

    def barrier(self) -> None:
        """As after loading the model."""
        limit = datetime.timedelta(seconds=60)
        dist.monitored_barrier(group=self.group, timeout=limit, wait_all_ranks=True)

    def step(self) -> None:
        """Exchange a row, as SGLang does before each batch of data-parallel attention."""
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        row = torch.full((ROW,), rank, dtype=torch.int64)
        rows = torch.empty(size * ROW, dtype=torch.int64)
        dp_attn.exchange_sync_rows(rows, row, self.group)
        assert rows.view(size, ROW)[:, 0].tolist() == list(range(size))


def run_rank(rank: int, pipe: Connection) -> None:
    load_plugins()
    member = Rank(rank, pipe.recv())
    group = member.coordinator.cpu_group
    say(pipe, "begun", ours=len(torchft_ext.backends_of(group)))
    member.barrier()
    steps = 0
    try:
        while True:
            member.step()
            steps += 1
            if steps == STEPS:
                say(pipe, "stepping")
    except torchft_ext.CommError as error:
        say(pipe, "failed", when=time.monotonic(), text=str(error))
    address, members = pipe.recv()
    torchft_ext.backend(group).configure(address, rank=members.index(rank), world_size=len(members))
    member.barrier()
    for _ in range(STEPS):
        member.step()
    same = member.coordinator.cpu_group is group
    say(pipe, "ended", same=same, size=dist.get_world_size(group))
    torchft_ext.backend(group).shutdown()


dp_attn = sglang_step.load()


def main() -> None:
    with Processes(run_rank) as ranks:
        pid, killed = ranks.kill_one()
        for rank, message in ranks.gather("failed").items():
            late = (message["when"] - killed) * 1e3
            print(f"rank {rank}: {late:.1f} ms after the kill of {pid}: {message['text']}")
        ranks.send((f"127.0.0.1:{ranks.store.port}/second", ranks.left()))
        ranks.print_ends()


if __name__ == "__main__":
    main()
