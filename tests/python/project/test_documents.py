"""The documents name tests, paths, commands and settings that exist."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import torchft_ext

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
# Where a path that a document names may begin.
BASES = ("", "docs", "csrc", "tests/python", "benchmarks/results")
SUFFIXES = (".py", ".sh", ".h", ".cpp", ".md", ".toml", ".txt", ".json")
OF_OTHERS = {"cuda.h", "nccl.h"}
FRAMEWORKS = ("accelerate/", "deepspeed/", "lightning/", "ray/", "torchtitan/", "transformers/")
# By the commands that name them, and by torch in each checkpoint.
MADE = ("build/", ".ci-work/", "dist/", ".venv", ".metadata")
EXAMPLE = "Suite.Case"  # how C++ tests are written
CLASSES_OF_OTHERS = {  # of torch and of frameworks
    "DataLoader",
    "DiLoCo",
    "DistBackendError",
    "DistributedDataParallel",
    "DistributedSampler",
    "Join",
    "LocalSGD",
    "PGTransport",
    "ParameterServer",
    "PartialState",
    "ProcessGroup",
    "TCPStore",
    "TorchFTManager",
    "TorchFTOptimizersContainer",
    "TorchftConfig",
    "Trainer",
    "WorkInfo",
    "WorkerGroupError",
    "WorkerHealthCheckFailedError",
}

SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
MESSAGE = re.compile(r"^### `(.+)`$", re.M)
PYTHON_TEST = re.compile(r"\btest_\w+\b(?!\*)")
CPP_TEST = re.compile(r"\b[A-Z]\w+\.[A-Z]\w*[a-z]\w*\b")
MAKE = re.compile(r"\bmake ([a-z]+)\b")
CLASS_NAME = re.compile(r"[A-Z]\w*[a-z]\w*")
CLASS = re.compile(r"^\s*(?:enum class|class|struct) (?:[A-Z_]+(?:\([^)]*\))? )?(\w+)", re.M)
VARIABLE = re.compile(r'"(TORCHFT_EXT_[A-Z_]+)"')


@cache
def python_tests() -> set[str]:
    """The names of tests, and of their files."""
    files = list((ROOT / "tests" / "python").rglob("*.py"))
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
    """Ours, Python's and those of others that documents speak of; and suites of C++ tests."""
    files = [*(ROOT / "csrc").rglob("*.*"), *(ROOT / "torchft_ext").glob("*.py*")]
    ours = (CLASS.findall(file.read_text()) for file in files)
    suites = {name.split(".")[0] for name in cpp_tests()}
    return suites.union(dir(builtins), CLASSES_OF_OTHERS, *ours)


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
            if re.fullmatch(r"\.?(?!\d+/\d+$)\w[\w./*-]*", path) and (
                "/" in path or path.endswith(SUFFIXES) or path.startswith(".")
            ):
                yield path


def exists(path: str) -> bool:
    if path in OF_OTHERS or path.startswith((*MADE, *FRAMEWORKS)):
        return True
    if path.startswith("torch/"):
        return (Path(torch.__file__).parent.parent / path).exists()
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


def test_every_promise_has_a_section_of_tests() -> None:
    promise = re.compile(r"^## (\d+\. .+)$", re.M)
    contract, tested = (
        promise.findall((ROOT / "docs" / name).read_text())
        for name in ("contract.md", "tested_promises.md")
    )
    assert contract == tested
    assert len(contract) == 14


def test_settings_in_the_contract_are_those_that_are_read() -> None:
    folders = (ROOT / "csrc", ROOT / "torchft_ext")
    sources = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    sources = [file for file in sources if file.suffix in {".h", ".cpp", ".py"}]
    sources.append(ROOT / "torchft_ext_names.py")
    read = {name for file in sources for name in VARIABLE.findall(file.read_text())}
    contract = (ROOT / "docs" / "contract.md").read_text()
    assert set(re.findall(r"\bTORCHFT_EXT_[A-Z_]+", contract)) == read
    assert len(read) >= 7


def words_of_messages() -> str:
    """All sources, with texts that are written in parts put together, and without line ends."""
    folders = (ROOT / "csrc", ROOT / "torchft_ext")
    files = (file for folder in folders for file in folder.rglob("*.*"))
    sources = [file.read_text() for file in files if file.suffix in {".cpp", ".h", ".py"}]
    return re.sub(r'"\s*f?"', "", "\n".join(sources))


def test_messages_in_troubleshooting_are_those_of_the_library() -> None:
    of_torch = {"Unknown backend type ft"}
    messages = MESSAGE.findall((ROOT / "docs" / "troubleshooting.md").read_text())
    assert len(messages) == len(set(messages)) > 50
    words = words_of_messages()
    assert {message for message in messages if message not in words} == of_torch


def statements_in(text: str) -> str:
    """The text, with the fences of its code taken off: they would count as expected output."""
    return re.sub(r"^```.*$", "", text, flags=re.M)


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if ">>>" in d.read_text()], ids=lambda path: path.name
)
def test_statements_in_documents_give_what_is_written_below_them(
    document: Path, tmp_path: Path
) -> None:
    extracted = tmp_path / document.name
    extracted.write_text(statements_in(document.read_text()))
    run = subprocess.run(
        [sys.executable, "-m", "doctest", str(extracted)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_reference_has_every_public_name_and_member() -> None:
    reference = (ROOT / "docs" / "reference" / "python.md").read_text()
    words = set(re.findall(r"[\w.]+", reference))
    assert {f"torchft_ext.{name}" for name in torchft_ext.__all__} <= words
    for cls in (torchft_ext.Backend, torchft_ext.Options, torchft_ext.Work):
        members = {name for name in vars(cls) if not name.startswith("_")}
        assert members - {"reconfigure"} <= words, cls


def programs_shown() -> set[Path]:
    shown = re.compile(r"^```\{literalinclude\} (\S+)$", re.M)
    return {
        (document.parent / path).resolve()
        for document in DOCUMENTS
        for path in shown.findall(document.read_text())
    }


def test_programs_shown_in_documents_are_run_by_a_test() -> None:
    runners = [
        ROOT / "tests" / "python" / "project" / "test_examples.py",
        ROOT / "tests" / "python" / "process_group" / "test_torchft.py",
        *(ROOT / "scripts" / f"check_{name}.sh" for name in ("frameworks", "trainers")),
    ]
    run = " ".join(runner.read_text() for runner in runners)
    assert programs_shown()
    assert {path for path in programs_shown() if path.stem not in run} == set()


def test_change_that_contributing_suggests_can_be_made() -> None:
    suggested = re.compile(r"^    sed -i 's/(.+)/(.+)/' (\S+)$", re.M)
    ((before, after, file),) = suggested.findall((ROOT / "CONTRIBUTING.md").read_text())
    source = (ROOT / file).read_text()
    assert source.count(before) == 1
    assert after not in source


def test_every_decision_has_its_number_once_and_a_place_in_the_contents() -> None:
    text = (ROOT / "docs" / "decisions.md").read_text()
    contents, *parts = re.split(r"^## ", text, flags=re.M)
    listed = [cell.split(", ") for cell in re.findall(r"^  - ([\d, ]+)$", contents, re.M)]
    assert listed == [re.findall(r"^### (\d+)\. ", part, re.M) for part in parts]
    numbers = sorted(int(number) for part in listed for number in part)
    assert len(numbers) == len(set(numbers)) > 90  # some were never given
    others = re.findall(r"^\*.*\b(?:by|decision|also) (\d+)", text, re.M)
    assert len(others) >= 10
    assert all(int(number) in numbers for number in others)


def test_glossary_is_short() -> None:
    rows = re.findall(r"^\* - (.+)$", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    terms = [row for row in rows if row != "term"]
    assert len(set(terms)) == len(terms)
    assert 15 < len(terms) <= 25


def test_layers_in_the_architecture_are_the_folders_of_sources() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    (table,) = re.findall(r"^\* - layer$.*?^```$", text, re.M | re.S)
    folders = {folder.name for folder in (ROOT / "csrc").iterdir() if folder.is_dir()}
    assert set(re.findall(r"^\* - `(\w+)`$", table, re.M)) == folders - {"include"}


def overlong(text: str) -> list[str]:
    """Lines over 100 columns, rows of tables over 120: of longer ones a list-table is made.

    Code, pictures and addresses cannot be broken.
    """
    opened = re.sub(r"^```\{list-table\}$(.*?)^```$", r"\1", text, flags=re.M | re.S)
    prose = re.sub(r"^```.*?^```$", "", opened, flags=re.M | re.S)
    kept = re.compile(r"^(    |!\[|.*https?://)")
    limits = ((line, 120 if line.startswith("|") else 100) for line in prose.splitlines())
    return [line for line, limit in limits if len(line) > limit and not kept.match(line)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_lines_are_of_100_columns_at_most_and_rows_of_120(document: Path) -> None:
    assert overlong(document.read_text()) == []


def test_overlong_lines_are_found() -> None:
    line, row = "word " * 21, "| word " * 18
    assert overlong(f"{line}\n| {line}\n{row}\n```\n{line}\n```\n") == [line, row]
    assert overlong(f"```{{list-table}}\n{line}\n```\n```\n{line}\n```\n") == [line]


def test_what_is_gone_is_found() -> None:
    text = """`test_no_such_claim`, `Listener.NoSuchCase`, `Records.ARecordSurvivesTheRoundTrip`,
        `csrc/gone.cpp`, `gone.h`, `rank 0/3`, `torch/gone.py`, `torch/version.py`,
        `scripts/gone.sh --fast`, `base/mutex.h`, [x](gone.md),
        `make gone`, `tests/python/test_gone_*.py`, `ReduceOp.AVG`, `build/dev`, `make test`,
        `GoneSuite`, `FinalFrame`, `Engine`"""
    assert missing_tests(text) == {"test_no_such_claim", "Listener.NoSuchCase"}
    assert missing_classes(text) == {"GoneSuite"}
    paths = {"csrc/gone.cpp", "gone.h", "scripts/gone.sh", "gone.md", "tests/python/test_gone_*.py"}
    paths.add("torch/gone.py")
    assert missing_paths(text, ROOT) == paths
    assert missing_targets(text) == {"gone"}
