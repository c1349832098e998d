"""The fragments of programs in documents, and in the heads of headers, call what there is.

In Python each call of this package's functions, classes and methods fits their signature. In C++
each name of the library is one that a public header declares.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator

import pytest
from test_documents import DOCUMENTS
from test_language_options import HEADERS, text_of

import torchft_ext
from torchft_ext import elastic, process_group

Called = Callable[..., object]

FENCED = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"(?:^\n|\A)((?:^    .*\n|^\n)+)", re.M)
# One block may show both languages.
LANGUAGE = re.compile(r"^(?=# Python|// C\+\+)", re.M)

# What a variable of this name is in a fragment.
VARIABLES: dict[str, type] = {
    "job": elastic.Job,
    "step": elastic.Step,
    "view": elastic.View,
    "answer": elastic.Answer,
}
MODULES = {"torchft_ext": torchft_ext, "elastic": elastic, "process_group": process_group}


def blocks_of(text: str) -> Iterator[str]:
    """Return what stands in fences and indented, each in one language."""
    for block in [*FENCED.findall(text), *INDENTED.findall(text)]:
        for part in LANGUAGE.split(textwrap.dedent(block)):
            if part.strip() and ">>>" not in part:
                yield part


# ---- in Python


def parsed(block: str) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(block))
    except SyntaxError:  # another language
        return None


def fields_of_instances(cls: type) -> set[str]:
    """Return those that the class itself does not show."""
    source = "" if cls.__module__ == "torchft_ext._C" else inspect.getsource(cls)
    return set(re.findall(r"^    (?:    self\.)?(\w+)(?:: .+)?(?: = |$)", source, re.M)) - set(
        dir(cls)
    )


def found(node: ast.expr, names: dict[str, object]) -> object | None:
    """Return what an expression names, as far as it is this package's; a method with its class.

    Raises:
        AttributeError: there is no such thing.
    """
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = found(node.value, names)
        if inspect.isclass(owner) and node.attr in fields_of_instances(owner):
            return VARIABLES.get(node.attr)
        return None if owner is None else getattr(owner, node.attr)
    if isinstance(node, ast.Call) and found(node.func, names) is torchft_ext.backend:
        return torchft_ext.Backend
    return None


def names_of(tree: ast.Module) -> dict[str, object]:
    names: dict[str, object] = {**VARIABLES, **MODULES}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("torchft_ext.process_group",):
            for name in node.names:
                names[name.asname or name.name] = getattr(process_group, name.name)
        elif isinstance(node, ast.ImportFrom) and node.module == "torchft_ext":
            for name in node.names:
                names[name.asname or name.name] = getattr(torchft_ext, name.name)
    return names


def is_method(node: ast.expr, names: dict[str, object]) -> bool:
    return isinstance(node, ast.Attribute) and inspect.isclass(found(node.value, names))


def check_call(call: ast.Call, function: Called, bound: bool) -> bool:
    """Return whether there was a signature to bind the arguments to.

    Raises:
        TypeError: they do not fit.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C++, without one
        return False
    given: list[object] = [argument for argument in call.args if not is_left_out(argument)]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    bind = signature.bind if len(given) == len(call.args) else signature.bind_partial
    bind(*([None] if bound else []), *given, **keywords)
    return True


def is_left_out(argument: ast.expr) -> bool:
    """Tell whether it is `...`, or a list of arguments whose length is not known."""
    dots = isinstance(argument, ast.Constant) and argument.value is ...
    return dots or isinstance(argument, ast.Starred)


def calls_that_fit(text: str) -> Iterator[str]:
    """Check every call of this package's in the fragments of a text; return what was called."""
    for tree in filter(None, map(parsed, blocks_of(text))):
        names = names_of(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found(node, names)  # it is there
            if not isinstance(node, ast.Call):
                continue
            function = found(node.func, names)
            if callable(function) and check_call(node, function, is_method(node.func, names)):
                yield ast.unparse(node.func)


def test_calls_in_documents_fit_the_signatures() -> None:
    called: set[str] = set()
    for document in DOCUMENTS:
        try:
            called.update(calls_that_fit(document.read_text()))
        except (AttributeError, TypeError) as error:
            raise AssertionError(f"{document.name}: {error}") from error
    assert {"elastic.join", "job.recover", "job.agree", "step.commit"} <= called
    assert len(called) > 15


@pytest.mark.parametrize(
    "call",
    [
        "elastic.join('h:1/j', 3)",
        "elastic.join('h:1/j', size=3, least=1)",
        "job.recover(timeout=limit, wait=True)",
        "job.begin_again()",
        "torchft_ext.backend(group).configure('h:1/x', 0)",
        "torchft_ext.no_such_thing",
    ],
)
def test_calls_that_do_not_fit_are_found(call: str) -> None:
    with pytest.raises((AttributeError, TypeError)):
        list(calls_that_fit(f"```python\n{call}\n```\n"))


# ---- in C++

HEADER_NAMES = set(
    re.findall(
        r"\w+",
        " ".join(text_of(str(path.relative_to(HEADERS))) for path in HEADERS.rglob("*.h")),
    )
)
# A name of the namespace, a member of one of its objects, a field that is set.
NAMES_IN_CPP = [
    re.compile(r"\b(?:torchft_ext|elastic)::(\w+)"),
    re.compile(r"\b(?:job->|comm\.|ddp\.|view\.|answer\.|failure\(\)\.|cause\.)(\w+)"),
    re.compile(r"[{,]\s*\.(\w+) = "),
    re.compile(r"\b(k[A-Z]\w+)\b"),
    re.compile(r"\b(tft_\w+)\b"),
]
INCLUDED = re.compile(r"#include <(torchft_ext/[\w/.]+)>")


def is_cpp(block: str) -> bool:
    return parsed(block) is None and re.search(r";\s*(//.*)?$", block, re.M) is not None


def cpp_blocks() -> Iterator[tuple[str, str]]:
    """Return each fragment and where it stands; also those in the heads of headers."""
    for document in DOCUMENTS:
        for block in filter(is_cpp, blocks_of(document.read_text())):
            yield document.name, block
    for header in sorted(HEADERS.rglob("*.h")):
        head = header.read_text().split("#pragma once")[0]
        code = re.findall(r"^//   (.*)$", head, re.M)
        if code:
            yield header.name, "\n".join(code)


def unknown_in(block: str) -> set[str]:
    """Return the names and headers of the library that there are not."""
    used = {name for pattern in NAMES_IN_CPP for name in pattern.findall(block)}
    headers = {name for name in INCLUDED.findall(block) if not (HEADERS.parent / name).exists()}
    return (used - HEADER_NAMES) | headers


def test_names_in_fragments_of_cpp_are_declared() -> None:
    blocks = list(cpp_blocks())
    assert {"cpp.md", "comm.h", "elastic.h", "process_group.h", "ddp.h"} <= {
        where for where, _ in blocks
    }
    assert len(blocks) > 12
    assert {(where, name) for where, block in blocks for name in unknown_in(block)} == set()


def test_names_that_are_not_declared_are_found() -> None:
    block = """#include <torchft_ext/gone.h>
    auto job = torchft_ext::elastic::Job::join({.address = place, .sise = 4});
    job->recoverNow(); torchft_ext::makeGrup(store); tft_comm_begone(comm);"""
    expected = {"torchft_ext/gone.h", "sise", "recoverNow", "makeGrup", "tft_comm_begone"}
    assert unknown_in(block) == expected
