"""The hooks of pre-commit check what CI checks, with the same versions."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text()
LINT = (ROOT / "scripts" / "lint.sh").read_text()


def test_hooks_have_the_versions_of_the_development_environment() -> None:
    pinned = dict(re.findall(r"additional_dependencies: \[([\w-]+)==([\w.]+)\]", HOOKS))
    wanted = re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements-dev.txt").read_text(), re.M)
    assert pinned.keys() == {"clang-format", "ruff"}
    assert pinned.items() <= set(wanted)


def test_mypy_is_told_by_pyproject_alone_what_it_checks() -> None:
    called = re.findall(r"^(?:\s*entry: )?(mypy\b[^#\n]*?) *(?:#.*)?$", HOOKS + LINT, re.M)
    assert called == ["mypy", "mypy"]
