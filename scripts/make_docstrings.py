#!/usr/bin/env python3
"""Writes the docstrings of torchft_ext/_C.pyi as a C++ header, which the bindings include.

So help() shows what the stub says, and a text has one place. The text of `Backend.configure` is
docs::Backend::configure, that of the class itself docs::Backend::about. A binding that names a text
which the stub has not does not compile. A method's text begins with its signature, in the form that
inspect.signature() reads. The header is left alone where nothing has changed.

    python scripts/make_docstrings.py torchft_ext/_C.pyi OUTPUT.h
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


def signature_of(function: ast.FunctionDef) -> str:
    """Names and defaults, without types: inspect.signature() reads no types there."""
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    return f"{function.name}({ast.unparse(arguments)})\n--\n\n"


def is_property(function: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "property" for d in function.decorator_list)


def texts_of(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The name of each constant of a class, and its text."""
    about = ast.get_docstring(node)
    if about is not None:
        yield "about", about
    for member in node.body:
        text = ast.get_docstring(member) if isinstance(member, ast.FunctionDef) else None
        if not isinstance(member, ast.FunctionDef) or text is None:
            continue
        name = "init" if member.name == "__init__" else member.name
        yield name, text if is_property(member) else signature_of(member) + text


def header(stub: str, source: str) -> str:
    lines = [f"// Made by scripts/make_docstrings.py from {source}.", "#pragma once", ""]
    for node in ast.parse(stub).body:
        if not isinstance(node, ast.ClassDef):
            continue
        lines.append(f"namespace torchft_ext::docs::{node.name} {{")
        for name, text in texts_of(node):
            lines.append(f'inline constexpr const char* {name} = R"doc({text})doc";')
        lines += ["}", ""]
    return "\n".join(lines)


def main() -> int:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    stub, output = Path(sys.argv[1]), Path(sys.argv[2])
    made = header(stub.read_text(), stub.name)
    if not output.exists() or output.read_text() != made:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
