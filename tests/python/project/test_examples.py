"""The programs that the documentation shows do what its pages say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchft_ext

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LIMIT = 100  # seconds; never reached

# For each program, what its page promises.
PROMISED = {
    "quickstart": [
        r"rank 1 of 3: the sum is 3",
        r"rank [02] of 3: lost rank 1: its process ended",
        r"rank 0 of 2: the sum is 2",
        r"rank 1 of 2: the sum is 2",
    ],
    "survive": [
        r"worker 0, step (9|10): .* rank 1 \(host \S+, pid \d+\): .*",
        r"20 steps done; 2 members hold the same weights",
    ],
    "fsdp": [
        r"worker 3: not needed for whole replicas",
        r"worker 0: rank 0 of 2, from step 10",
        r"worker 1: rank 1 of 2, from step 10",
        r"20 steps done by 2 members",
    ],
    "elastic_hsdp": [
        r"step 0: 4 of 4 members train",
        r"step 2[01]: 2 of 3 members train",
        r"step \d+: 4 of 4 members train\n600 steps done",
    ],
    "subgroup": [
        r"rank 0: the sum is 2, of ranks \[0, 2\]",
        r"rank 2: the sum is 2, of ranks \[0, 2\]",
    ],
    "read_error": [
        r"allreduce #1 on '0' \(rank 0/3, .*",
        r" +limit: 0:00:30",
        r" +cause: Cause\(rank=2, other_rank=None, host='\S+', pid=\d+, how='its process ended'\)",
        r" +failures by kind: \{'peer_lost': 1, .*",
    ],
    "see_what_happens": [
        r"waited for: \{.*2: \d+\.\d+\}",
        r"allreduce #3 on '0' \(rank 0/3, generation 1\): (.* )?did not complete within 4 s: it "
        r"waited for rank 2 \(host \S+, pid \d+\): its last operation is allreduce #2, .* its "
        r"main thread sleeps",
        r"allreduce #1 on '0' \(rank 0/3, generation 2\): rank 2 \(.*\): its process ended",
    ],
}


def text_of(command: list[str]) -> str:
    run = subprocess.run(
        command, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=LIMIT
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def missing(promised: list[str], text: str) -> list[str]:
    """Anywhere in the text: two processes may write into one line."""
    return [each for each in promised if re.search(each, text) is None]


@pytest.mark.parametrize("program", PROMISED)
def test_program_says_what_its_page_says(program: str) -> None:
    text = text_of([sys.executable, f"examples/{program}.py"])
    assert missing(PROMISED[program], text) == [], text


def test_quickstart_runs_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    text = text_of([*torchrun, "examples/quickstart.py"])
    assert missing(PROMISED["quickstart"], text) == [], text


def test_a_shell_around_workers_keeps_torchrun_from_ending_the_survivors(tmp_path: Path) -> None:
    source = (EXAMPLES / "quickstart.py").read_text()
    assert source.count("os._exit(0)") == 1
    killed = tmp_path / "killed.py"
    # torchrun looks at its workers ten times a second: without the shell it would end them by then.
    wait = "time.sleep(1)\n    # The survivors name"
    killed.write_text(
        source.replace("os._exit(0)", "os.kill(os.getpid(), 9)").replace(
            "# The survivors name", wait
        )
    )
    worker = f'PYTHONPATH=examples {sys.executable} {killed} || echo "worker $RANK: status $?"'
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    text = text_of([*torchrun, "--no-python", "sh", "-c", worker])
    assert missing([*PROMISED["quickstart"], "worker 1: status 137"], text) == [], text


def test_launcher_fails_where_all_copies_fail(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)\n")
    run = subprocess.run(
        [sys.executable, "examples/start.py", "2", str(script)],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert run.returncode == 1


# ---- the programs in C and C++, as far as CMake decides


def configure_examples(build: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command of docs/howto/cpp.md, with more options."""
    package = Path(torchft_ext.__file__).parent
    beside_python = Path(sys.executable).parent
    cmake = shutil.which("cmake", path=f"{beside_python}:{os.environ['PATH']}")
    assert cmake is not None
    prefix = f"-DCMAKE_PREFIX_PATH={package}"
    return subprocess.run(
        [cmake, "-S", str(EXAMPLES / "cpp"), "-B", str(build), prefix, *options],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def test_programs_on_libtorch_are_built_by_the_command_of_their_page(tmp_path: Path) -> None:
    run = configure_examples(tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "CMakeFiles" / "train.dir").is_dir()
    assert (tmp_path / "CMakeFiles" / "serve.dir").is_dir()


def test_programs_on_libtorch_without_a_torch_are_an_error_of_cmake(tmp_path: Path) -> None:
    run = configure_examples(tmp_path, f"-Dtorchft_ext_TORCH_DIR={tmp_path}/nowhere")
    assert run.returncode != 0
    assert "no lib/libtorch_cpu.so in" in " ".join(run.stderr.split())
    assert configure_examples(tmp_path, "-DEXAMPLES_WITH_TORCH=OFF").returncode == 0
