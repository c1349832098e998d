"""What completion and help() show of the public modules is what they promise, and nothing else."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

PUBLIC = ["torchft_ext", "torchft_ext.elastic", "torchft_ext.errors", "torchft_ext.process_group"]


@pytest.mark.parametrize("name", PUBLIC)
def test_module_shows_its_public_names_alone(name: str) -> None:
    for other in PUBLIC:
        importlib.import_module(other)
    module = importlib.import_module(name)
    shown = {one for one in dir(module) if not one.startswith("_")}
    submodules = {one.removeprefix(f"{name}.") for one in PUBLIC if one.startswith(f"{name}.")}
    assert shown == {*module.__all__, *submodules}


def callables_of(module: ModuleType) -> Iterator[tuple[str, Callable[..., object]]]:
    """Its functions, classes and their public methods, as far as they are this package's."""
    for name in module.__all__:
        value = getattr(module, name)
        if not callable(value):
            continue
        yield name, value
        if inspect.isclass(value):
            for one, method in inspect.getmembers(value, callable):
                if not one.startswith("_") and hasattr(method, "__module__"):
                    yield f"{name}.{one}", method


@pytest.mark.parametrize("name", PUBLIC)
def test_public_signatures_have_no_private_arguments(name: str) -> None:
    checked = 0
    for called, function in callables_of(importlib.import_module(name)):
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # of C++, without a signature
            continue
        private = [one for one in parameters if one.startswith("_")]
        assert not private, f"{name}.{called}: {private}"
        checked += 1
    assert checked > 5
