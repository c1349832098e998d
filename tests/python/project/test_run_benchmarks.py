"""benchmarks/run.py runs native and Python benchmarks, and draws; ft_bench's own rows."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("TORCHFT_EXT_BUILD_ROOT", ROOT / "build"))
NATIVE = BUILD / "dev" / "benchmarks" / "native"
LIMIT_S = 240


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.stem}_for_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


checker = load(ROOT / "scripts" / "check_benchmarks.py")
runner = load(ROOT / "benchmarks" / "run.py")


def run_all(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--quick", *words]
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **environment},
    )


def ft_bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(NATIVE / "ft_bench"), *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)


def rows_of(*words: str) -> dict[str, dict]:
    done = ft_bench(*words)
    assert done.returncode == 0, done.stderr
    return {row["op"]: row for row in json.loads(done.stdout.splitlines()[-1])["results"]}


def test_ft_gloo_and_the_limit_are_measured_in_one_run_and_drawn(tmp_path: Path) -> None:
    done = run_all(f"--json={tmp_path}", f"--pictures={tmp_path}", "rivals")
    assert done.returncode == 0, done.stderr
    assert checker.troubles_in(tmp_path, ["rivals"]) == []


def test_a_benchmark_that_fails_fails_the_run(tmp_path: Path) -> None:
    done = run_all("ft_bench", TORCHFT_EXT_BUILD_ROOT=str(tmp_path))
    assert done.returncode == 1
    assert "failed: ft_bench" in done.stdout
    assert "has not been built" in done.stderr


def test_the_check_knows_every_benchmark_of_the_run() -> None:
    assert set(checker.WANTED) == set(runner.BENCHMARKS)
    drawn = {
        name: tuple(file for _, file in each.pictures)
        for name, each in runner.BENCHMARKS.items()
        if each.pictures
    }
    assert drawn == checker.PICTURES


def test_the_documents_measured_pictures_are_drawn_by_the_run() -> None:
    shown = {
        name
        for page in (ROOT / "README.md", ROOT / "docs" / "measured.md")
        for name in re.findall(r"images/(\w+\.png)", page.read_text())
    }
    drawn = {file for each in runner.BENCHMARKS.values() for _, file in each.pictures}
    assert shown
    assert shown <= drawn


def test_without_torchft_its_scenarios_alone_are_left_out(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "recovery.py"
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['torchft'] = None\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    written = tmp_path / "recovery.json"
    brief = ["--world=2", "--kills=1", "--torchft-kills=1", "--resident=0", f"--json={written}"]
    done = subprocess.run(
        [sys.executable, str(script), *brief, "--scenarios=running,torchft,torchft-ft"],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if "torchft-ft" in line]
    assert told == ["left out: torchft, torchft-ft: torchft is not installed"]
    results = json.loads(written.read_text())["results"]
    assert [result["scenario"] for result in results] == ["running"]


def test_a_death_is_told_by_every_survivor_in_every_round() -> None:
    rows = rows_of("--op", "death", "--world", "4", "--rounds", "2")
    assert rows["death"]["seconds"]["count"] == 2 * 3
    assert rows["death_last"]["seconds"]["count"] == 2
    assert rows["death_last"]["seconds"]["max"] == rows["death"]["seconds"]["max"]


def test_an_agreement_is_also_told_in_barriers_of_the_same_run() -> None:
    row = rows_of("--op", "agree", "--world", "3", "--rounds", "2")["agree"]
    told = row["seconds"]["median"] / (row["barrier_us"] / 1e6)
    assert row["barriers"] == pytest.approx(told, rel=0.01)


def test_a_process_alone_tells_its_time_and_its_memory() -> None:
    row = rows_of("--op", "startup", "--world", "1", "--rounds", "2")["startup"]
    assert row["seconds"]["count"] == 2
    assert row["peak_mib"] > 1


@pytest.mark.parametrize("world", ["2", "3", "5"])
def test_what_the_limit_computes_is_right(world: str) -> None:
    sizes = ["--max", "3M", "--factor", "700K", "--seconds", "0.001"]
    command = [str(NATIVE / "shm_limit"), "--op", "all", "--world", world, *sizes]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--op", "nothing"), "nothing is none of them"),
        (("--min", "4X"), "K, M or G"),
        (("--world",), "a value is missing"),
        (("--what", "1"), "no such argument"),
    ],
)
def test_wrong_arguments_of_ft_bench_are_told(words: tuple[str, ...], told: str) -> None:
    done = ft_bench(*words)
    assert done.returncode == 2
    assert told in done.stderr
