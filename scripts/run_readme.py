#!/usr/bin/env python3
"""Runs the Python blocks of README.md as its reader would, with a peer that dies where they say so.

Rank 0 runs the first block, statement by statement, and then the others. Once its group stands,
rank 1 is killed: so the block's `except` is what goes on. What the reader supplies is stood in for:
the store's host, who is left, a loss, an optimizer.

    python scripts/run_readme.py README.md
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=60)
STORE_IN_README = "host0:29500"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
READY = "the group stands"


def run_statements(block: str, names: dict[str, object], store: dist.Store) -> None:
    for statement in ast.parse(block).body:
        exec(compile(ast.Module([statement], []), "README.md", "exec"), names)
        if dist.is_initialized():
            store.set(READY, "yes")


def reader(blocks: list[str], store: dist.TCPStore) -> None:
    """Rank 0."""
    asked = []

    def agree_on_who_is_left() -> tuple[int, int]:
        asked.append(dist.get_world_size())
        return 0, 1

    first, *others = blocks
    if first.count(STORE_IN_README) != 1:
        raise RuntimeError(f"README.md: expected {STORE_IN_README} once in its first block")
    address = f"{store.host}:{store.port}"
    names: dict[str, object] = {"agree_on_who_is_left": agree_on_who_is_left}
    run_statements(first.replace(STORE_IN_README, address), names, store)
    if asked != [2] or dist.get_world_size() != 1:
        raise RuntimeError(f"README.md: the peer's death was not noticed: asked {asked}")
    weight = torch.ones(1, requires_grad=True)
    names.update(loss=weight.square().sum(), optimizer=torch.optim.SGD([weight], lr=0.1))
    for block in others:
        run_statements(block, names, store)
    dist.destroy_process_group()


def victim(store: dist.TCPStore) -> None:
    """Rank 1."""
    dist.init_process_group("ft", timeout=LIMIT)
    store.wait([READY], LIMIT)
    os.kill(os.getpid(), signal.SIGKILL)


def rank_main(readme: Path) -> None:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=LIMIT)
    if os.environ["RANK"] == "0":
        reader(BLOCK.findall(readme.read_text()), store)
    else:
        victim(store)


def start(rank: int, store: dist.TCPStore) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        # The store is this process's: no port that another could take meanwhile.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    command = [sys.executable, __file__, sys.argv[1]]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if "RANK" in os.environ:
        rank_main(Path(sys.argv[1]))
        return 0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    processes = [start(rank, store) for rank in range(2)]
    try:
        said = [process.communicate(timeout=LIMIT.total_seconds())[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    print(said[0], end="")
    if [process.returncode for process in processes] != [0, -signal.SIGKILL]:
        print(f"ended with {[process.returncode for process in processes]}: expected 0, and a kill")
        return 1
    if not re.search(r"^1 \S+ .+$", said[0], re.M):
        print("expected a line with the dead rank, its host, and how that was known")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
