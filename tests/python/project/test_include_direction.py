"""scripts/check_includes.py finds includes that point up, and the project has none."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def load_checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "check_includes", ROOT / "scripts" / "check_includes.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checker = load_checker()


def tree(root: Path, **files: str) -> Path:
    """A csrc with one header in every layer, then `files` ("net__a_cpp" is net/a.cpp)."""
    for layer in (*checker.LEVEL, "include/torchft_ext"):
        (root / layer).mkdir(parents=True)
        (root / layer / "x.h").write_text("#pragma once\n#include <string>\n")
    for name, text in files.items():
        path = name.replace("__", "/").replace("_cpp", ".cpp").replace("_h", ".h")
        (root / path).write_text(text)
    return root


ENDS = re.compile(
    r"std::(terminate|abort|exit|_Exit|quick_exit)\b|(?<!\w)::(abort|_?exit)\(|\braise\("
)


def test_no_source_ends_the_process() -> None:
    """The library never ends the process that it is loaded into."""
    sources = sorted((ROOT / "csrc").rglob("*.[ch]*"))
    assert sources
    for path in sources:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not ENDS.search(line.split("//")[0]), f"{path}: {line}"


DEFINED = re.compile(
    r"^(?:class|struct|enum class) (?:VISIBILITY_HIDDEN )?(\w+(?:::\w+)*)\b[^;(]*\{", re.M
)


def test_no_two_headers_define_types_of_one_name() -> None:
    """The linker takes either for both: their members are called on the other's memory."""
    headers = [path for part in ("csrc", "tests/cpp") for path in (ROOT / part).rglob("*.h")]
    places: dict[str, set[str]] = {}
    for path in headers:
        for name in DEFINED.findall(path.read_text(encoding="utf-8")):
            places.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    assert len(places) > 300
    public = {"View", "Answer"}  # of the namespace torchft_ext::elastic, too
    twice = {name: sorted(found) for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in public} == {}


def test_the_project_has_no_include_that_points_up() -> None:
    assert checker.check(ROOT / "csrc") == []


def test_includes_of_the_same_and_lower_layers_pass(tmp_path: Path) -> None:
    text = '#include "host/x.h"\n#include "membership/x.h"\n#include "torchft_ext/x.h"\n'
    assert checker.check(tree(tmp_path / "csrc", host__a_cpp=text)) == []


def test_engines_are_known_to_the_layer_that_registers_them(tmp_path: Path) -> None:
    files = {
        "engines__a_cpp": '#include "nccl/x.h"\n#include "device/x.h"\n',
        "c10d__a_cpp": '#include "engines/x.h"\n#include "device/x.h"\n',
    }
    assert checker.check(tree(tmp_path / "csrc", **files)) == []


@pytest.mark.parametrize(
    ("name", "include", "complaint"),
    [
        ("net__a_cpp", '"comm/x.h"', "net must not know comm"),
        ("liveness__a_cpp", '"membership/x.h"', "liveness must not know membership"),
        ("comm__a_cpp", '"host/x.h"', "comm must not know host"),
        ("base__a_cpp", '"net/absent.h"', "no such file"),
        ("net__a_cpp", '"x.h"', "expected a path from csrc"),
        ("c10d__a_cpp", '"nccl/x.h"', "c10d must not know nccl"),
        ("python__a_cpp", '"nccl/x.h"', "python must not know nccl"),
        ("libtorch__a_cpp", '"nccl/x.h"', "libtorch must not know nccl"),
        ("python__a_cpp", '"engines/x.h"', "python must not know engines"),
        ("nccl__a_cpp", '"engines/x.h"', "nccl must not know engines"),
        ("nccl__a_cpp", '"host/x.h"', "nccl must not know host"),
        ("host__a_cpp", '"device/x.h"', "host must not know device"),
        ("c10d__a_cpp", '"embed/x.h"', "c10d must not know embed"),
        ("child__a_cpp", '"c10d/x.h"', "child must not know c10d"),
        ("child__a_cpp", '"elastic/x.h"', "child must not know elastic"),
        ("child__a_cpp", '"engines/x.h"', "child must not know engines"),
        ("device_child__a_cpp", '"nccl/x.h"', "device_child must not know nccl"),
        ("embed__a_cpp", '"c10d/x.h"', "embed must not know c10d"),
        ("host__a_cpp", "<torch/types.h>", "torch belongs to device"),
        ("c10d__a_cpp", "<pybind11/pybind11.h>", "only python/ sees Python"),
        ("c10d__a_cpp", "<torch/csrc/utils/pybind.h>", "only python/ sees Python"),
    ],
)
def test_a_forbidden_include_is_named(
    tmp_path: Path, name: str, include: str, complaint: str
) -> None:
    problems = checker.check(tree(tmp_path / "csrc", **{name: f"\n#include {include}\n"}))
    assert len(problems) == 1
    assert complaint in problems[0]
    assert "a.cpp:2" in problems[0]


def test_public_headers_include_only_public_headers(tmp_path: Path) -> None:
    root = tree(tmp_path / "csrc")
    (root / "include" / "torchft_ext" / "y.h").write_text('#include "base/x.h"\n')
    assert "a public header includes only public headers" in checker.check(root)[0]


def test_an_empty_tree_is_a_problem_not_a_pass(tmp_path: Path) -> None:
    assert checker.check(tmp_path) != []
