#!/usr/bin/env python3
"""Start copies of a script on this machine; when one of them fails, the others go on.

    python examples/start.py 3 examples/survive.py

The copies get what torchrun would give them: RANK, WORLD_SIZE, MASTER_ADDR and so on. torchrun ends
all workers when one fails. This launcher writes into its store who is left: launcher_membership.py
has the record, and how a worker reads it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch.distributed as dist
from launcher_membership import Membership, publish


def environment(rank: int, count: int, store: dist.TCPStore) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the launcher's, not rank 0's
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }


def copies_of(script: str, count: int) -> int:
    """Run them; block until all have ended. Return 0 if one at least has finished well."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = Membership.first(count)
    command = [sys.executable, script]
    running = [subprocess.Popen(command, env=environment(r, count, store)) for r in range(count)]
    finished = 0
    left = list(running)  # by rank in the newest membership
    while running:
        time.sleep(0.01)
        for worker in [each for each in running if each.poll() is not None]:
            running.remove(worker)
            if worker.returncode == 0:
                finished += 1
                continue
            members = members.without(left.index(worker))
            left.remove(worker)
            publish(store, members)
    return 0 if finished > 0 else 1


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(copies_of(sys.argv[2], int(sys.argv[1])))
