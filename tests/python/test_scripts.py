"""The scripts say how they are used, and do nothing else when asked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.sh") if path.name != "common.sh")


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_prints_usage_and_does_nothing_else(name: str, tmp_path: Path) -> None:
    places = {"VENV": str(tmp_path / "venv"), "TORCHFT_EXT_BUILD_ROOT": str(tmp_path / "build")}
    run = subprocess.run(
        ["bash", f"scripts/{name}", "--help"],
        cwd=ROOT,
        # No program but these can be found, so nothing can be built, fetched or checked.
        env={**os.environ, **places, "PATH": str(tools_in(tmp_path / "bin"))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert f"scripts/{name}" in run.stdout and "#!" not in run.stdout
    assert all(line == line.lstrip("#") for line in run.stdout.splitlines())
    assert os.listdir(tmp_path) == ["bin"]


def test_tidy_uses_the_environments_own_tool_and_says_where_it_comes_from(tmp_path: Path) -> None:
    run = subprocess.run(
        ["bash", "scripts/tidy.sh"],
        cwd=ROOT,
        env={**os.environ, "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert f"no clang-tidy in {tmp_path}/venv: run scripts/setup.sh" in run.stderr


def tools_in(directory: Path) -> Path:
    """The directory, with what the usage of a script is printed with and nothing else."""
    directory.mkdir()
    for tool in ("bash", "sed", "dirname"):
        found = next(p for p in map(Path, ("/usr/bin", "/bin")) if (p / tool).exists())
        (directory / tool).symlink_to(found / tool)
    return directory
