"""Gives autodoc the signatures of torchft_ext/_C.pyi, with their types.

The native module has names and defaults of arguments, but no types.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torchft_ext

STUB = ast.parse((Path(torchft_ext.__file__).parent / "_C.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}


def method(cls: str, name: str) -> ast.FunctionDef | None:
    members = CLASSES[cls].body if cls in CLASSES else []
    found = (m for m in members if isinstance(m, ast.FunctionDef) and m.name == name)
    return next(found, None)


def written(function: ast.FunctionDef) -> tuple[str, str | None]:
    """Its arguments but self, and what it returns; None where that is nothing."""
    arguments = function.args
    shown = ast.arguments(
        arguments.posonlyargs,
        arguments.args[1:],
        arguments.vararg,
        arguments.kwonlyargs,
        arguments.kw_defaults,
        arguments.kwarg,
        arguments.defaults,
    )
    returns = ast.unparse(function.returns) if function.returns is not None else "None"
    return f"({ast.unparse(shown)})", None if returns == "None" else returns


def signature(
    app: Any, what: str, name: str, obj: Any, options: Any, found: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    if found is None:  # of a property, or of a class that nobody makes
        return None
    cls, _, member = name.removeprefix("torchft_ext.").removeprefix("_C.").partition(".")
    function = method(cls, member or "__init__")
    if function is not None:
        return written(function)
    # Users know the public name alone.
    return found.replace("_C.", ""), returned.replace("torchft_ext._C.", "") if returned else None


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-signature", signature)
    return {"parallel_read_safe": True}
