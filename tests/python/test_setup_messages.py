"""setup.py tells a user what to do where torch is missing or of an unsupported minor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build_with_torch(directory: Path, version_py: str | None) -> str:
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
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode != 0
    return run.stdout + run.stderr


def test_a_missing_torch_is_named_with_the_command_to_run(tmp_path: Path) -> None:
    said = build_with_torch(tmp_path, None)
    assert "no torch" in said
    assert "pip install . --no-build-isolation" in said


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cu130", "3.1.0"])
def test_an_unsupported_torch_is_refused_with_the_supported_range(
    tmp_path: Path, version: str
) -> None:
    said = build_with_torch(tmp_path, f"__version__ = '{version}'\n")
    assert version in said
    assert "torch 2.11 to 2.15" in said
