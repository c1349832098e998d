#!/usr/bin/env python3
"""What an error says: a process is killed while two others wait for it.

python examples/read_error.py
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import start
import torch
import torch.distributed as dist

import torchft_ext


def main() -> None:
    dist.init_process_group("ft", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    if rank == 2:
        time.sleep(0.5)  # the others are in their all_reduce by then
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except torchft_ext.CommError as error:
        if rank == 0:
            print(error)
            for name in ("op", "seq", "rank", "size", "elapsed", "limit", "cause"):
                print(f"    {name}: {getattr(error, name)}")
            print(f"    failures by kind: {torchft_ext.backend().stats()['failures']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(start.copies_of(__file__, 3))
