"""Where the modules of the Python tests lie. They import each other by name, from any folder."""

from __future__ import annotations

from pathlib import Path

PYTHON = Path(__file__).resolve().parent / "python"


def of_python_tests() -> list[str]:
    """Every folder of tests/python: for sys.path, and for the PYTHONPATH of ranks."""
    found = [path for path in PYTHON.iterdir() if path.is_dir() and not path.name.startswith("_")]
    return [str(path) for path in sorted(found)]
