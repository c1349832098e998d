#!/usr/bin/env python3
"""Refuses an #include that points up the layers, or lets torch or Python in below their layer.

    {python, libtorch} -> c10d -> engines -> {host, nccl, staged} -> device -> {comm, elastic}
    -> {liveness, membership} -> net -> base; {embed, child} -> host; elastic for c10d alone;
    device_child -> {child, engines}

A layer may include itself and those to its right; the public headers (torchft_ext/...) count as
base, and include nothing but each other (those of torchft_ext/torch also torch's), since they are
installed alone. Some layers have fewer who may know them (KNOWN_TO): who serves tensors reaches
nccl through device and engines. torch's headers belong to device, nccl, engines and what is above
them; Python's and pybind11's to python alone.

    python scripts/check_includes.py [csrc]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LEVEL = {
    "base": 0,
    "net": 1,
    "liveness": 2,
    "membership": 2,
    "comm": 3,
    "elastic": 3,
    "device": 4,
    "host": 5,
    "nccl": 5,
    "staged": 5,
    "engines": 6,
    "embed": 6,
    "child": 6,
    "c10d": 7,
    "device_child": 7,
    "libtorch": 8,
    "python": 8,
}
# A layer that only these may include, of those above it.
KNOWN_TO = {
    "elastic": {"c10d"},
    "device": {"nccl", "staged", "engines", "c10d", "python", "device_child"},
    "nccl": {"engines"},
    "staged": {"engines"},
    "engines": {"c10d", "device_child"},
    "embed": set[str](),
    "child": {"device_child"},
    "device_child": set[str](),
}
WITH_TORCH = ("device", "nccl", "staged", "engines", "device_child", "c10d", "libtorch", "python")
PUBLIC = "torchft_ext"
PUBLIC_TORCH = "torchft_ext/torch/"
TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")
PYTHON = re.compile(r"pybind11/|torch/csrc/utils/pybind\.h|Python\.h$|torch/(extension|python)\.h$")
MADE = {"python/docstrings.h"}  # by the build
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def layer_of(path: str) -> str | None:
    """The layer of a path as an include writes it; None: not one of ours."""
    first, slash, _ = path.partition("/")
    return first if slash and (first in LEVEL or first == PUBLIC) else None


def own_include_problem(source: str, target: str, root: Path) -> str | None:
    """What is wrong with a quoted include of `target` in `source` (both relative to csrc)."""
    from_layer, to_layer = layer_of(source), layer_of(target)
    if to_layer is None:
        return f'"{target}": expected a path from csrc, such as "net/frame.h"'
    if target not in MADE and not any(
        (base / target).is_file() for base in (root, root / "include")
    ):
        return f'"{target}": no such file under csrc or csrc/include'
    if to_layer == PUBLIC:
        return None
    if from_layer == PUBLIC:
        return f'"{target}": a public header includes only public headers'
    assert from_layer is not None
    if to_layer == from_layer:
        return None
    below = LEVEL[to_layer] < LEVEL[from_layer]
    known = to_layer not in KNOWN_TO or from_layer in KNOWN_TO[to_layer]
    return None if below and known else f'"{target}": {from_layer} must not know {to_layer}'


def foreign_include_problem(source: str, target: str) -> str | None:
    layer = layer_of(source)
    if PYTHON.match(target) and layer != "python":
        return f"<{target}>: only python/ sees Python"
    of_torch = layer in WITH_TORCH or source.startswith(PUBLIC_TORCH)
    if TORCH.match(target) and not of_torch:
        return f"<{target}>: torch belongs to {', '.join(WITH_TORCH)}"
    return None


def problems_in(file: Path, root: Path) -> list[str]:
    source = file.relative_to(root).as_posix().removeprefix("include/")
    if layer_of(source) is None:
        return [f"{file}: not in a known layer ({', '.join(LEVEL)}, include/{PUBLIC})"]
    found = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        match = INCLUDE.match(line)
        if match is None:
            continue
        quote, target = match.groups()
        if quote == '"' and not TORCH.match(target):
            problem = own_include_problem(source, target, root)
        else:
            problem = foreign_include_problem(source, target)
        if problem is not None:
            found.append(f"{file}:{number}: {problem}")
    return found


def check(root: Path) -> list[str]:
    files = sorted(path for path in root.rglob("*") if path.suffix in {".h", ".cpp"})
    if not files:
        return [f"{root}: no C++ files found"]
    return [problem for file in files for problem in problems_in(file, root)]


def main() -> int:
    default = Path(__file__).resolve().parent.parent / "csrc"
    problems = check(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
    print("\n".join(problems) if problems else "includes point one way")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
