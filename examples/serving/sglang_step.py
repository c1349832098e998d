"""SGLang's exchange_sync_rows(), without the rest of its module, which imports CUDA's packages."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from sglang.srt.distributed.utils import all_gather_single

NAME = "sglang.srt.managers.scheduler_components.dp_attn"
FUNCTION = "exchange_sync_rows"


def load() -> ModuleType:
    """Return a module of that name which has the function alone, as its source has it."""
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.origin is not None
    file = Path(package.origin).parent.joinpath(*NAME.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(file.read_text())
    tree.body = [
        each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == FUNCTION
    ]
    module = sys.modules[NAME] = ModuleType(NAME)
    vars(module).update(torch=torch, all_gather_single=all_gather_single)
    exec(compile(tree, str(file), "exec"), vars(module))
    return module
