"""Ranks of a healthy program leave in any order, by any way, and nothing is written on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ORDERS = ("012", "120", "201", "210")  # who has the store is the first, the middle one, the last
WAYS = ("destroy", "shut_down", "just_end", "sys_exit", "destroy_and_die")
LIMIT = 100  # seconds, for some cases together
AT_ONCE = 5  # times that all leave at the same moment: what goes wrong then does so now and then


def assert_quiet(env: dict[str, str], cases: list[str]) -> None:
    command = [sys.executable, str(HERE / "leaving_ranks.py"), *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout.splitlines()[-1])
    assert len(written) == len(cases) and done.stderr == ""
    for case, texts in written:
        assert texts == [""] * 3, (case, texts)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_leave_one_after_the_other_write_nothing(rank_env, way):
    assert_quiet(rank_env, [f"{way}/{order}" for order in ORDERS])


@pytest.mark.timeout(120)
def test_ranks_that_leave_at_once_write_nothing(rank_env):
    assert_quiet(rank_env, ["destroy/all", "just_end/all"] * AT_ONCE)


UNDER_TORCHRUN = """
import torch
import torch.distributed as dist

dist.init_process_group("ft")
dist.all_reduce(torch.ones(3))
dist.all_reduce(torch.ones(3), group=dist.new_group([0, 1]))
if dist.get_rank() == 1:
    dist.destroy_process_group()
"""


@pytest.mark.timeout(120)
def test_ranks_of_torchrun_write_nothing(rank_env, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(UNDER_TORCHRUN)
    how = ["--standalone", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "torch.distributed.run", *how, str(script)]
    done = subprocess.run(command, env=rank_env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and done.stderr == "", done.stderr
