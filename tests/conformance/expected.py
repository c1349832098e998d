"""The differences that are known, each with the line of torch that refuses."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

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
    rows = [
        Expected(way, test, located(torch, row["file"], row["line"]), ours=False)
        for row in tables.get("torch", [])
        for way in row["ways"]
        for test in row["tests"]
    ]
    rows += [
        Expected(way, test, row["fault"], ours=True)
        for row in tables.get("ours", [])
        for way in row["ways"]
        for test in row["tests"]
    ]
    return rows


def located(torch: Path, file: str, line: str) -> str:
    """Where that line stands in torch: its number is another in each version."""
    path = torch.parent / file
    if not path.exists():  # C++, of which the wheel has only headers
        return f"{file}: {line}"
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if text.strip() == line:
            return f"{file}:{number}: {line}"
    raise StaleError(
        f"{FILE.name}: {file} of this torch has no line {line!r}: remove or mend the row"
    )
