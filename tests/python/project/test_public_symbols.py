"""The libraries have for programs what cmake/public_*.txt lists, and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchft_ext

ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = Path(torchft_ext.__file__).parent / "lib"


def load() -> ModuleType:
    path = ROOT / "scripts" / "public_symbols.py"
    spec = importlib.util.spec_from_file_location("public_symbols", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["public_symbols"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


symbols = load()


@pytest.mark.parametrize("library", ["core", "torch"])
def test_public_symbols_are_those_that_are_listed_and_declared(library: str) -> None:
    assert symbols.problems(library, LIBRARIES / f"libtorchft_ext_{library}.so") == []


def test_a_function_that_the_list_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = [each for each in symbols.listed("core") if each != "tft_barrier"]
    monkeypatch.setattr(symbols, "listed", lambda library: [*shorter, "tft_invented"])
    found = "\n".join(symbols.problems("core", LIBRARIES / "libtorchft_ext_core.so"))
    assert "public, and not in the list: tft_barrier" in found
    assert "in the list, and not public: tft_invented" in found


def test_what_headers_declare_is_told_from_what_only_has_its_name() -> None:
    own = symbols.declared(symbols.HEADERS)

    def is_public(plain: str) -> bool:
        return symbols.is_public(symbols.Symbol("_Z", plain, "T", ""), own, own.classes)

    assert is_public("torchft_ext::toString(torchft_ext::FailureKind)")
    assert not is_public("torchft_ext::toString(torchft_ext::OpKind)")  # an internal type
    assert is_public("torchft_ext::Comm::rank() const")
    assert not is_public("torchft_ext::Group::rank() const")
