"""The documents name tests, paths, commands and settings that exist."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# Where a path that a document names may begin.
BASES = ("", "docs", "csrc", "tests/python", "benchmarks/results")
SUFFIXES = (".py", ".sh", ".h", ".cpp", ".md", ".toml", ".txt", ".json")
OF_OTHERS = {"cuda.h", "nccl.h"}
MADE = ("build/", ".ci-work/", "dist/", ".venv")  # by the commands that name them
EXAMPLE = "Suite.Case"  # how C++ tests are written
CLASSES_OF_TORCH = {
    "DataLoader",
    "DistBackendError",
    "DistributedSampler",
    "ProcessGroup",
    "WorkInfo",
}

SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PYTHON_TEST = re.compile(r"\btest_\w+\b(?!\*)")
CPP_TEST = re.compile(r"\b[A-Z]\w+\.[A-Z]\w*[a-z]\w*\b")
MAKE = re.compile(r"\bmake ([a-z]+)\b")
CLASS_NAME = re.compile(r"[A-Z]\w*[a-z]\w*")
CLASS = re.compile(r"^\s*(?:enum class|class|struct) (?:[A-Z_]+(?:\([^)]*\))? )?(\w+)", re.M)
VARIABLE = re.compile(r'"(TORCHFT_EXT_[A-Z_]+)"')


@cache
def python_tests() -> set[str]:
    """The names of tests, and of their files."""
    files = list((ROOT / "tests" / "python").glob("*.py"))
    named = (re.findall(r"^def (test_\w+)", file.read_text(), re.M) for file in files)
    return {file.stem for file in files}.union(*named)


@cache
def cpp_tests() -> set[str]:
    """Suite.Case."""
    macro = re.compile(r"^(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\s*\)", re.M)
    files = (ROOT / "tests" / "cpp").rglob("*.cpp")
    return {".".join(pair) for file in files for pair in macro.findall(file.read_text())}


@cache
def classes() -> set[str]:
    """Ours, Python's and those of torch's that documents speak of; and suites of C++ tests."""
    files = [*(ROOT / "csrc").rglob("*.*"), *(ROOT / "torchft_ext").glob("*.py*")]
    ours = (CLASS.findall(file.read_text()) for file in files)
    suites = {name.split(".")[0] for name in cpp_tests()}
    return suites.union(dir(builtins), CLASSES_OF_TORCH, *ours)


@cache
def file_names() -> set[str]:
    """Of all sources, for documents that name one without its folder."""
    folders = ("csrc", "tests", "scripts", "benchmarks", "examples", "torchft_ext", "docs")
    return {path.name for folder in folders for path in (ROOT / folder).rglob("*.*")}


def paths_in(text: str) -> Iterator[str]:
    """Words of code spans that are written like paths of this repository."""
    for span in SPAN.findall(text):
        for word in span.split():
            path = word.split("::")[0].rstrip(",;")
            if re.fullmatch(r"\.?\w[\w./*-]*", path) and (
                "/" in path or path.endswith(SUFFIXES) or path.startswith(".")
            ):
                yield path


def exists(path: str) -> bool:
    if path in OF_OTHERS or path.startswith(MADE):
        return True
    if "/" not in path and path in file_names():
        return True
    return any(next((ROOT / base).glob(path), None) is not None for base in BASES)


def missing_tests(text: str) -> set[str]:
    python = set(PYTHON_TEST.findall(text)) - python_tests()
    return python | (set(CPP_TEST.findall(text)) - cpp_tests() - {EXAMPLE})


def missing_classes(text: str) -> set[str]:
    """Of code spans that are one such name."""
    names = {span for span in SPAN.findall(text) if CLASS_NAME.fullmatch(span)}
    return names - classes()


def missing_paths(text: str, folder: Path) -> set[str]:
    paths = {path for path in paths_in(text) if not exists(path)}
    links = {link.split("#")[0] for link in LINK.findall(text) if "://" not in link}
    return paths | {link for link in links if not (folder / link).exists()}


def missing_targets(text: str) -> set[str]:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    commands = (MAKE.match(span) for span in SPAN.findall(text))
    return {command[1] for command in commands if command} - set(targets)


def headings(file: Path) -> set[str]:
    """As links name them."""
    titles = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_and_classes_named_in_documents_exist(document: Path) -> None:
    assert missing_tests(document.read_text()) == set()
    assert missing_classes(document.read_text()) == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_commands_named_in_documents_exist(document: Path) -> None:
    text = document.read_text()
    assert missing_paths(text, document.parent) == set()
    assert missing_targets(text) == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_headings_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(document.read_text()):
        path, _, heading = link.partition("#")
        if heading and "://" not in link:
            assert heading in headings(document.parent / path if path else document), link


def test_settings_in_the_contract_are_those_that_are_read() -> None:
    folders = (ROOT / "csrc", ROOT / "torchft_ext")
    sources = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    sources = [file for file in sources if file.suffix in {".h", ".cpp", ".py"}]
    sources.append(ROOT / "torchft_ext_autoload.py")
    read = {name for file in sources for name in VARIABLE.findall(file.read_text())}
    contract = (ROOT / "docs" / "contract.md").read_text()
    assert set(re.findall(r"\bTORCHFT_EXT_[A-Z_]+", contract)) == read
    assert len(read) >= 7


def test_what_is_gone_is_found() -> None:
    text = """`test_no_such_claim`, `Listener.NoSuchCase`, `Records.ARecordSurvivesTheRoundTrip`,
        `csrc/gone.cpp`, `gone.h`, `scripts/gone.sh --fast`, `base/mutex.h`, [x](gone.md),
        `make gone`, `tests/python/test_gone_*.py`, `ReduceOp.AVG`, `build/dev`, `make test`,
        `GoneSuite`, `LastWords`, `Engine`"""
    assert missing_tests(text) == {"test_no_such_claim", "Listener.NoSuchCase"}
    assert missing_classes(text) == {"GoneSuite"}
    paths = {"csrc/gone.cpp", "gone.h", "scripts/gone.sh", "gone.md", "tests/python/test_gone_*.py"}
    assert missing_paths(text, ROOT) == paths
    assert missing_targets(text) == {"gone"}
