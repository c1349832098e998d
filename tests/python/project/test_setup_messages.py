"""setup.py says what a build misses and what to do: torch, tools, headers, a newer setuptools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SUPPORTED_TORCH = "__version__ = '2.13.0'\n"

# What Python runs before setup.py. The directories in which this Python has its programs and its
# headers become others, so that neither those of the test's own environment nor Debian's are seen.
SITE = """
import sysconfig
found = sysconfig.get_path
moved = {{"scripts": {scripts!r}, "include": {include!r}}}
sysconfig.get_path = lambda name, *rest: moved[name] if name in moved else found(name, *rest)
"""


def refused_build(directory: Path, version_py: str | None, **environment: str) -> str:
    """Runs a build where Python finds the torch in `directory` first; returns what it printed."""
    (directory / "torch").mkdir()
    (directory / "torch" / "__init__.py").write_text(
        "raise AssertionError('setup.py imported torch')"
    )
    if version_py is not None:
        (directory / "torch" / "version.py").write_text(version_py)
    run = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(directory / "out")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(directory), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode != 0
    assert "Traceback" not in run.stderr
    return run.stdout + run.stderr


def build_without(missing: set[str], directory: Path, **environment: str) -> str:
    """Runs a build on a machine that has all a build needs except `missing`.

    The programs that are there do nothing but fail: the build ends at the first one it runs.
    """
    programs, headers = directory / "bin", directory / "include"
    for folder in (programs, headers):
        folder.mkdir()
    for name in {"cmake", "ninja", "g++"} - missing:
        (programs / name).write_text("#!/bin/sh\nexit 1\n")
        (programs / name).chmod(0o755)
    if "Python.h" not in missing:
        (headers / "Python.h").touch()
    site = SITE.format(scripts=str(directory / "scripts"), include=str(headers))
    (directory / "sitecustomize.py").write_text(site)
    environment = {"PATH": str(programs), "CXX": "", **environment}
    return refused_build(directory, SUPPORTED_TORCH, **environment)


def missing_of(said: str) -> list[str]:
    """The lines in which setup.py lists what it misses."""
    return [line for line in said.splitlines() if line.startswith("  - ")]


def test_a_missing_torch_is_named_with_the_command_to_run(tmp_path: Path) -> None:
    said = refused_build(tmp_path, None)
    assert "no torch" in said
    assert "pip install . --no-build-isolation" in said


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cu130", "3.1.0"])
def test_an_unsupported_torch_is_refused_with_the_supported_range(
    tmp_path: Path, version: str
) -> None:
    said = refused_build(tmp_path, f"__version__ = '{version}'\n")
    assert version in said
    assert "torch 2.11 to 2.15" in said


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("cmake", "pip install cmake"),
        ("ninja", "pip install ninja"),
        ("g++", "apt-get install g++"),
        ("Python.h", "apt-get install python3-dev"),
    ],
)
def test_what_alone_is_missing_is_named_alone_with_how_to_get_it(
    tmp_path: Path, missing: str, advice: str
) -> None:
    (line,) = missing_of(build_without({missing}, tmp_path))
    assert line.startswith(f"  - {missing}")
    assert advice in line


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    lines = missing_of(build_without({"cmake", "ninja", "g++", "Python.h"}, tmp_path))
    assert [line.split()[1].strip(",") for line in lines] == ["cmake", "ninja", "g++", "Python.h"]


@pytest.mark.parametrize("cxx", ["no-such-clang++", "no-such-clang++ --verbose"])
def test_a_compiler_that_cxx_names_and_that_is_missing_is_named(tmp_path: Path, cxx: str) -> None:
    (line,) = missing_of(build_without(set(), tmp_path, CXX=cxx))
    assert line.startswith("  - no-such-clang++, a C++20 compiler")
    assert "set CXX" in line


def test_a_step_of_the_build_that_fails_is_named(tmp_path: Path) -> None:
    said = build_without(set(), tmp_path)
    assert missing_of(said) == []
    assert f"failed, see the lines above: {tmp_path}/bin/cmake -S" in said


def test_an_old_setuptools_is_refused_with_the_command_to_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import setuptools\nsetuptools.__version__ = '76.1.0'"
    )
    said = refused_build(tmp_path, SUPPORTED_TORCH)
    assert "found setuptools 76.1.0" in said
    assert "pip install 'setuptools>=77'" in said
