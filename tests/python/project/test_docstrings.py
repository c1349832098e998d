"""help() shows what the stub of the native module says: torchft_ext/_C.pyi is the only place."""

from __future__ import annotations

import ast
import inspect
import pydoc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchft_ext import _C

ROOT = Path(__file__).resolve().parents[3]
STUB = ast.parse((Path(_C.__file__).parent / "_C.pyi").read_text())


def texts() -> Iterator[tuple[str, str]]:
    """Dotted name in the module, and the stub's text of it."""
    for node in STUB.body:
        if not isinstance(node, ast.ClassDef) or not hasattr(_C, node.name):
            continue
        functions = (member for member in node.body if isinstance(member, ast.FunctionDef))
        for place in (node, *functions):
            text = ast.get_docstring(place)
            if text is not None:
                yield f"{node.name}.{place.name}" if place is not node else node.name, text


def found(name: str) -> object:
    value: object = _C
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("name", "text"), list(texts()), ids=[name for name, _ in texts()])
def test_help_shows_the_text_of_the_stub(name: str, text: str) -> None:
    assert inspect.getdoc(found(name)) == text
    shown = pydoc.render_doc(found(name), renderer=pydoc.plaintext)
    assert all(line.strip() in shown for line in text.splitlines())


def test_every_public_class_and_member_has_a_text() -> None:
    named = {name for name, _ in texts()}
    public = {
        f"{cls}.{member}"
        for cls in ("Backend", "Future", "Options", "Work")
        for member in vars(getattr(_C, cls))
        if not member.startswith("_") and member != "reconfigure"  # torch's own, overridden
    }
    assert public | {"Backend", "Future", "Options", "Work", "Options.__init__"} <= named


def parameters_in_stub(name: str) -> list[str]:
    """As inspect writes them, without types."""
    cls, method = name.split(".")
    (node,) = (n for n in STUB.body if isinstance(n, ast.ClassDef) and n.name == cls)
    (function,) = (f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == method)
    arguments = function.args.args + function.args.kwonlyargs
    return [argument.arg for argument in arguments]


@pytest.mark.parametrize(
    "name", ["Backend.configure", "Backend.abort", "Backend.shrink", "Options.__init__"]
)
def test_signature_is_that_of_the_stub(name: str) -> None:
    signature = inspect.signature(found(name))
    assert list(signature.parameters) == parameters_in_stub(name)


def test_defaults_are_shown() -> None:
    shown = str(inspect.signature(_C.Backend.configure))
    assert shown == "(self, store_addr, rank, world_size, *, timeout=None)"
    shown = pydoc.render_doc(_C.Backend.abort, renderer=pydoc.plaintext)
    assert "abort(self, why='abort() was called')" in shown


def test_header_is_written_anew_only_where_the_stub_has_changed(tmp_path: Path) -> None:
    stub, header = tmp_path / "x.pyi", tmp_path / "made" / "x.h"
    command = [sys.executable, ROOT / "scripts" / "make_docstrings.py", stub, header]
    stub.write_text(
        'class A:\n    """About A."""\n    def f(self, x: int = 3) -> int:\n        "F."\n'
    )
    subprocess.run(command, check=True, timeout=60)
    assert 'about = R"doc(About A.)doc";' in header.read_text()
    assert 'f = R"doc(f(self, x=3)\n--\n\nF.)doc";' in header.read_text()
    written = header.stat().st_mtime_ns
    subprocess.run(command, check=True, timeout=60)
    assert header.stat().st_mtime_ns == written
