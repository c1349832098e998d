"""No modules of the package import each other in a circle, inside of functions either."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOP = ("torchft_ext_autoload.py", "torchft_ext_names.py")


def sources(root: Path) -> dict[str, Path]:
    """The modules below `root` by name; the native one, which imports none, is not among them."""
    files = [*(root / "torchft_ext").rglob("*.py"), *(root / name for name in TOP)]
    found = {}
    for path in files:
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def for_types_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Each node that runs, in functions and branches too."""
    yield node
    if isinstance(node, ast.If) and for_types_alone(node):
        children: Iterator[ast.AST] = iter(node.orelse)
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from statements(child)


def names_imported(node: ast.AST) -> list[str]:
    """The names that a statement may mean a module by; the longest of each one counts."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports of the project are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        return [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return []


def module_of(name: str, modules: dict[str, Path]) -> str | None:
    if name in modules:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in modules and name != "torchft_ext._C" else None


def imports(root: Path) -> dict[str, set[str]]:
    modules = sources(root)
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = [
            name
            for node in statements(ast.parse(path.read_text(encoding="utf-8")))
            for name in names_imported(node)
        ]
        found = {module_of(name, modules) for name in names} - {None, module}
        graph[module] = {each for each in found if each is not None}
    return graph


def circle(root: Path) -> list[str]:
    """The modules of a circle in the order of its imports; empty: there is none."""
    try:
        TopologicalSorter(imports(root)).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = imports(ROOT)
    assert len(graph) > 90
    assert sum(map(len, graph.values())) > 200
    assert "torchft_ext._register" in graph["torchft_ext_autoload"], "imports in functions count"
    assert circle(ROOT) == []


def test_names_stand_below_the_package() -> None:
    """`import torch` loads them, and must not load the package."""
    assert imports(ROOT)["torchft_ext_names"] == set()


IN_A_FUNCTION = "def ask():\n    from torchft_ext.low import answer\n    return answer()\n"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torchft_ext.low\n"
BY_NAME = "import importlib\nimportlib.import_module('torchft_ext.low')\n"
OF_THE_NATIVE = "from torchft_ext import _C\n"


@pytest.mark.parametrize(
    ("text", "is_circle"),
    [
        ("import torchft_ext.low\n", True),
        ("from torchft_ext import low\n", True),
        (IN_A_FUNCTION, True),
        (BY_NAME, True),
        (FOR_TYPES, False),
        (OF_THE_NATIVE, False),
    ],
)
def test_a_circle_is_found(tmp_path: Path, text: str, is_circle: bool) -> None:
    package = tmp_path / "torchft_ext"
    package.mkdir()
    (package / "__init__.py").write_text("from torchft_ext.high import ask\n")
    (package / "high.py").write_text(text)
    (package / "low.py").write_text("def answer():\n    from torchft_ext.high import ask\n")
    for name in TOP:
        (tmp_path / name).write_text("")
    assert bool(circle(tmp_path)) == is_circle
