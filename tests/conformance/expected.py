"""The differences that are known, each with the line of torch that refuses."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("expected.toml")


@dataclass(frozen=True)
class Expected:
    """A test that passes on gloo and not in this way.

    Attributes:
        refused_by: "file:line: text" of the comparison with gloo's name in the torch that is
            installed; what is to be mended where the fault is this package's.
        ours: whether the fault is this package's.
    """

    way: str
    test: str
    refused_by: str
    ours: bool


class StaleError(Exception):
    """A row names a line that torch does not have."""


def read(torch: Path, file: Path = FILE) -> list[Expected]:
    """The rows, with lines looked up in torch, whose directory this is.

    Raises:
        StaleError: torch's file does not hold the line that a row quotes.
    """
    tables = tomllib.loads(file.read_text())
    rows = []
    for row in tables.get("torch", []):
        where = located(torch, row["file"], row["after"], row["line"])
        rows += expand(row, where, ours=False)
    for row in tables.get("ours", []):
        rows += expand(row, row["fault"], ours=True)
    return rows


def expand(row: dict[str, Any], refused_by: str, ours: bool) -> list[Expected]:
    """A row for each test in each way."""
    return [Expected(way, test, refused_by, ours) for way in row["ways"] for test in row["tests"]]


def located(torch: Path, file: str, after: str, line: str) -> str:
    """Where that line stands in torch."""
    lines = [text.strip() for text in (torch.parent / file).read_text().splitlines()]
    try:
        number = lines.index(line, lines.index(after))
    except ValueError as error:
        what = f"{file} of this torch has no line {line!r} after {after!r}"
        raise StaleError(f"{FILE.name}: {what}: remove or mend the row") from error
    return f"{file}:{number + 1}: {line}"
