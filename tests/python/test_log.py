"""The log goes through torch's levels: one line for each epoch and each failure, or silence."""

from __future__ import annotations

import subprocess
import sys

EPOCHS_AND_A_FAILURE = """
from datetime import timedelta
import torch, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("ft", store=store, rank=0, world_size=1)
import torchft_ext
backend = torchft_ext.backend()
address = f"127.0.0.1:{store.port}"
backend.configure(address + "/second", 0, 1)
dist.all_reduce(torch.ones(3))
try:
    backend.configure(address + "/third", 0, 2, timeout=timedelta(seconds=1))
except torchft_ext.CommTimeoutError:
    backend.configure(address + "/fourth", 0, 1)
dist.destroy_process_group()
"""


def lines_at(level: str | None, env: dict[str, str]) -> list[str]:
    """Our lines on stderr at torch's log level; None: the default."""
    chosen = {name: value for name, value in env.items() if name != "TORCH_CPP_LOG_LEVEL"}
    if level is not None:
        chosen["TORCH_CPP_LOG_LEVEL"] = level
    done = subprocess.run(
        [sys.executable, "-c", EPOCHS_AND_A_FAILURE],
        env=chosen,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "torchft_ext" in line]


def test_each_epoch_and_each_failure_is_one_line_at_level_info(rank_env):
    lines = lines_at("INFO", rank_env)
    assert len([line for line in lines if "of 1 ranks begins" in line]) == 3, lines
    assert len([line for line in lines if "configure on" in line]) == 1, lines


def test_at_the_default_level_only_the_failure_is_told(rank_env):
    (line,) = lines_at(None, rank_env)
    assert "configure on" in line and "W" in line.split()[0]


def test_nothing_is_told_below_its_level(rank_env):
    assert lines_at("ERROR", rank_env) == []
