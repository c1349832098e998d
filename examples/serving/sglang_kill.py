#!/usr/bin/env python3
"""SGLang: four ranks step together, one is killed, the others go on in the same group.

    TORCHFT_EXT_REPLACE_GLOO=1 python examples/serving/sglang_kill.py

Real: SGLang's groups (its GroupCoordinator), its step's exchange, its barrier after loading, its
plugin loading. There is no model and no scheduler. SGLang itself does not go on after an error: its
scheduler ends the server. What follows the kill here is this program's own.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import sglang_step
import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.plugins import load_plugins

import torchft_ext

RANKS, KILLED = 4, 2
STEPS = 50  # before the kill, and after the recovery
ROW = 8  # numbers of a rank in a step
LIMIT_S = 120.0  # of each wait of the parent


class Rank:
    """One process of the server."""

    def __init__(self, rank: int, port: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        self.coordinator = parallel_state.GroupCoordinator(
            group_ranks=[list(range(RANKS))],
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
    pipe.send({"event": "begun", "ours": len(torchft_ext.backends_of(group))})
    member.barrier()
    steps = 0
    try:
        while True:
            member.step()
            steps += 1
            if steps == STEPS:
                pipe.send({"event": "stepping"})
    except torchft_ext.CommError as error:
        pipe.send({"event": "failed", "when": time.monotonic(), "text": str(error)})
    address, members = pipe.recv()
    torchft_ext.backend(group).configure(address, rank=members.index(rank), world_size=len(members))
    member.barrier()
    for _ in range(STEPS):
        member.step()
    same = member.coordinator.cpu_group is group
    pipe.send({"event": "ended", "same": same, "size": dist.get_world_size(group)})
    torchft_ext.backend(group).shutdown()


def gather(pipes: dict[int, Connection], event: str) -> dict[int, Any]:
    """Wait for this event of each; a SystemExit where one ends first, or none comes in time."""
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        missing = {pipe: rank for rank, pipe in pipes.items() if rank not in found}
        ready = wait(list(missing), LIMIT_S)
        if not ready:
            sys.exit(f"no '{event}' from ranks {sorted(missing.values())}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except EOFError:
                sys.exit(f"rank {missing[pipe]} ended before its '{event}'")
            if message["event"] == event:
                found[missing[pipe]] = message
    return found


def tell(pipes: dict[int, Connection], victim: BaseProcess, address: str) -> None:
    """Kill one, tell what the others know, begin a generation of theirs."""
    begun = gather(pipes, "begun")
    print("groups of torchft_ext:", all(one["ours"] == 1 for one in begun.values()))
    gather(pipes, "stepping")
    killed = time.monotonic()
    victim.kill()
    left = {rank: pipe for rank, pipe in pipes.items() if rank != KILLED}
    for rank, message in gather(left, "failed").items():
        late = (message["when"] - killed) * 1e3
        print(f"rank {rank}: {late:.1f} ms after the kill of {victim.pid}: {message['text']}")
    for pipe in left.values():
        pipe.send((f"{address}/second", sorted(left)))
    for rank, message in gather(left, "ended").items():
        print(f"rank {rank}: same group: {message['same']}, members: {message['size']}")


dp_attn = sglang_step.load()


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    fork = multiprocessing.get_context("fork")
    pipes, processes = {}, []
    for rank in range(RANKS):
        pipes[rank], theirs = fork.Pipe()
        processes.append(fork.Process(target=run_rank, args=(rank, theirs)))
        processes[rank].start()
        theirs.close()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for pipe in pipes.values():
        pipe.send(store.port)
    try:
        tell(pipes, processes[KILLED], f"127.0.0.1:{store.port}")
    finally:
        for process in processes:
            process.kill()
            process.join(30)


if __name__ == "__main__":
    main()
