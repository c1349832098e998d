#!/usr/bin/env python3
"""Runs the Python blocks of README.md as their reader would, with a peer that dies.

The block with elastic.join() is run by three processes, one of which is killed while they train:
the others have to end all steps as two. The other block is run by rank 0 of a group of two, and by
a rank 1 that is killed once the group stands: so its `except` is what goes on. What the reader
supplies is stood in for: the store's host, data, the rank and size that a manager gives.

    python scripts/run_readme.py README.md
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=60)
STORE_IN_README = "host0:29500"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
READY = "the group stands"
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "elastic_minimal.py"
OWN = re.compile(r"elastic\.(join|steps)\(")
MEMBERS = 3
STEPS_BEFORE_DEATH = 20


def run_statements(block: str, names: dict[str, Any], store: dist.Store) -> None:
    for statement in ast.parse(block).body:
        exec(compile(ast.Module([statement], []), "README.md", "exec"), names)
        if dist.is_initialized():
            store.set(READY, str(dist.get_world_size()))


def blocks_of(readme: Path, store: dist.TCPStore) -> tuple[str, str]:
    """The elastic one, and the other."""
    blocks = BLOCK.findall(readme.read_text())
    if len(blocks) != 2 or any(block.count(STORE_IN_README) != 1 for block in blocks):
        raise RuntimeError(f"README.md: expected two Python blocks with {STORE_IN_README} in each")
    address = f"{store.host}:{store.port}"
    other, elastic = sorted(
        (block.replace(STORE_IN_README, address) for block in blocks),
        key=lambda block: "elastic.join" in block,
    )
    return elastic, other


# ---- the block without elastic


def reader(block: str, store: dist.TCPStore) -> None:
    """Rank 0."""
    run_statements(block, {"rank": 0, "size": 1}, store)
    if dist.get_world_size() != 1:
        raise RuntimeError("README.md: the peer's death was not noticed")
    dist.destroy_process_group()


def victim(store: dist.TCPStore) -> None:
    """Rank 1."""
    dist.init_process_group("ft", timeout=LIMIT)
    store.wait([READY], LIMIT)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- the elastic block


def missing_in_example(block: str) -> list[str]:
    """Lines that the example does not have; what join() and steps() are given is its own there."""
    example = {line.strip() for line in EXAMPLE.read_text().splitlines()}
    lines = (line.strip() for line in block.splitlines())
    return [line for line in lines if line not in example and not OWN.search(line)]


def die_in_training(names: dict[str, Any]) -> None:
    while "state" not in names or names["state"].step < STEPS_BEFORE_DEATH:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def member(number: int, block: str) -> None:
    if missing := missing_in_example(block):
        raise RuntimeError(f"README.md: {EXAMPLE.name} does not have the lines {missing}")
    inputs = torch.ones(4096, 16)
    names: dict[str, Any] = {"inputs": inputs, "targets": inputs.sum(1, keepdim=True)}
    if number == MEMBERS - 1:
        threading.Thread(target=die_in_training, args=[names], daemon=True).start()
    exec(compile(block, "README.md", "exec"), names)
    if names["step"].view.size != MEMBERS - 1:
        raise RuntimeError(f"README.md: the last step was one of {names['step'].view.size}")
    print(f"{names['state'].step} steps as two")


# ---- processes


def child(what: str, number: int, readme: Path) -> None:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=LIMIT)
    elastic, other = blocks_of(readme, store)
    if what == "member":
        member(number, elastic)
    elif number == 0:
        reader(other, store)
    else:
        victim(store)


def start(what: str, number: int, count: int, store: dist.TCPStore) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "RANK": str(number),
        "WORLD_SIZE": str(count),
        # The store is this process's: no port that another could take meanwhile.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    command = [sys.executable, __file__, sys.argv[1], what]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def run(what: str, count: int, store: dist.TCPStore) -> str | None:
    """What the first process said; None: they did not end as they should."""
    processes = [start(what, number, count, store) for number in range(count)]
    try:
        said = [process.communicate(timeout=LIMIT.total_seconds())[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    print(said[0], end="")
    ends = [process.returncode for process in processes]
    if ends == [0] * (count - 1) + [-signal.SIGKILL]:
        return said[0]
    print(f"{what}: ended with {ends}: expected a kill of the last, and 0 of the others")
    return None


def main() -> int:
    if len(sys.argv) == 3:
        child(sys.argv[2], int(os.environ["RANK"]), Path(sys.argv[1]))
        return 0
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    trained = run("member", MEMBERS, store)
    survived = run("rank", 2, store)
    if trained is None or survived is None:
        return 1
    if not re.search(r"^1 \S+ .+$", survived, re.M):
        print("expected a line with the dead rank, its host, and how that was known")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
