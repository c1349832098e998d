"""What must work before anything of ours can: torch's own "nccl", or ft itself where the device is
simulated; one sum of two ranks, in the environment that the tests of several ranks have."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import accelerator
import torch
import torch.distributed as dist

LIMIT = 20.0  # seconds
WORLD = 2


def rank_main(rank: int, path: str) -> None:
    if accelerator.simulated():
        import torchft_ext  # noqa: F401
    began = time.monotonic()
    accelerator.prepare()
    torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    backend = "ft:nccl" if accelerator.simulated() else "nccl"
    store = dist.FileStore(path, WORLD)
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=limit)
    tensor = torch.full((1000,), rank + 1.0, device=accelerator.device())
    dist.all_reduce(tensor)
    found = tensor.cpu()
    if not bool((found == WORLD * (WORLD + 1) / 2).all()):
        raise SystemExit(f"rank {rank}: a wrong sum: {found}")
    dist.destroy_process_group()
    print(f"rank {rank}: {backend}, {time.monotonic() - began:.1f} s", flush=True)


def main() -> int:
    if len(sys.argv) > 1:
        rank_main(int(sys.argv[1]), sys.argv[2])
        return 0
    env = {**os.environ, **accelerator.environment()}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen([sys.executable, __file__, str(rank), f"{folder}/store"], env=env)
            for rank in range(WORLD)
        ]
        try:
            statuses = [rank.wait(LIMIT) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    return 0 if statuses == [0] * WORLD else 1


if __name__ == "__main__":
    sys.exit(main())
