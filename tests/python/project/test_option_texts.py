"""help(Options) and the stub say what the contract's table of settings says of each option."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
from pathlib import Path

import pytest

import torchft_ext

ROOT = Path(__file__).resolve().parents[3]
ROW = re.compile(r"^\* - `(\w+)`\n  -(.*(?:\n    .*)*)", re.M)  # its first two cells


def settings() -> dict[str, list[str]]:
    """By option, the environment variables that the contract names beside it."""
    rows = ROW.findall((ROOT / "docs" / "contract.md").read_text())
    return {option: re.findall(r"`(\w+)`", variables) for option, variables in rows}


def options_in_stub() -> tuple[list[str], str]:
    """The parameters of Options(), and their text."""
    stub = ast.parse((Path(torchft_ext.__file__).parent / "_C.pyi").read_text())
    (options,) = (n for n in stub.body if isinstance(n, ast.ClassDef) and n.name == "Options")
    init = next(n for n in options.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    return [argument.arg for argument in init.args.kwonlyargs], ast.get_docstring(init) or ""


def test_contract_has_a_row_for_every_option():
    assert list(settings()) == options_in_stub()[0]


@pytest.mark.parametrize("option", settings())
def test_help_says_what_the_option_means(option):
    text = inspect.getdoc(getattr(torchft_ext.Options, option)) or ""
    assert text.startswith(("timedelta", "str", "bool")) and "Default: " in text
    assert all(variable in text for variable in settings()[option])
    whole = pydoc.render_doc(torchft_ext.Options, renderer=pydoc.plaintext)
    assert all(line.strip() in whole for line in text.splitlines())


@pytest.mark.parametrize("option", settings())
def test_arguments_of_options_are_explained_in_short(option):
    _, text = options_in_stub()
    assert re.search(rf"^    {option}: \S.*\.$", text, re.M) is not None


def test_help_of_options_names_what_is_raised():
    text = inspect.getdoc(torchft_ext.Options.__init__) or ""
    assert "ValueError: " in text and "TypeError: " in text
