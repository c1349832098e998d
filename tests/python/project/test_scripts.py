"""The scripts say how they are used, and do nothing else when asked."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
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


def set_up_without_a_compiler(user: int, directory: Path) -> tuple[str, str]:
    """What scripts/setup.sh prints as that user, and what it asks of apt-get."""
    tools = tools_in(directory / "bin", "realpath", "nproc", "cat")
    asked = directory / "asked"
    for name, line in {
        "id": f"echo {user}",
        "make": "true",
        "apt-get": f'echo "$@" >>{asked}',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{line}\n")
        (tools / name).chmod(0o755)
    run = subprocess.run(
        ["bash", "scripts/setup.sh"],
        cwd=ROOT,
        env={"PATH": str(tools), "VENV": str(directory / "venv"), "PYTHON": sys._base_executable},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode != 0  # nothing more can be done with these tools
    assert not (directory / "venv").exists()
    return run.stderr, asked.read_text() if asked.exists() else ""


def test_setup_names_what_is_missing_to_who_may_not_install_it(tmp_path: Path) -> None:
    said, asked = set_up_without_a_compiler(1000, tmp_path)
    assert "missing on this machine: g++\n" in said
    assert "sudo apt-get install g++\n" in said
    assert asked == ""


def test_setup_installs_what_is_missing_as_root(tmp_path: Path) -> None:
    said, asked = set_up_without_a_compiler(0, tmp_path)
    assert "installing Debian packages: g++\n" in said
    update, install = asked.splitlines()
    assert update.endswith("update") and install.endswith("install g++")


def offer_torch(directory: Path, version: str) -> None:
    """A wheel of that version of torch, with nothing in it."""
    directory.mkdir()
    about = f"torch-{version}.dist-info"
    with zipfile.ZipFile(directory / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")


@pytest.mark.parametrize("lifted", [True, False])
def test_machines_cap_on_torch_holds_until_a_script_lifts_it(lifted: bool, tmp_path: Path) -> None:
    offer_torch(tmp_path / "offered", "9.8.7")
    (tmp_path / "caps.txt").write_text("torch<=2.0\n")
    (tmp_path / "pip.conf").write_text(f"[global]\nconstraint = {tmp_path}/caps.txt\n")
    lift = f"lift_caps_on_torch 9.8.7 {tmp_path}/constraints.txt; " if lifted else ""
    install = f"python -m pip download --no-index -f {tmp_path}/offered -d {tmp_path} torch==9.8.7"
    run = subprocess.run(
        ["bash", "-c", f"source scripts/common.sh; {lift}{install}"],
        cwd=ROOT,
        env={**os.environ, "VENV": sys.prefix, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (run.returncode == 0) == lifted, run.stderr
    assert (tmp_path / "torch-9.8.7-py3-none-any.whl").exists() == lifted


def tools_in(directory: Path, *more: str) -> Path:
    """The directory, with what the usage of a script is printed with, these, and nothing else."""
    directory.mkdir()
    for tool in ("bash", "sed", "dirname", *more):
        found = next(p for p in map(Path, ("/usr/bin", "/bin")) if (p / tool).exists())
        (directory / tool).symlink_to(found / tool)
    return directory
