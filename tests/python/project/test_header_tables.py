"""Tables in comments of headers keep their columns: clang-format refills paragraphs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OFF, ON = "// clang-format off", "// clang-format on"
# A paragraph in which two spaces are left of a table's column.
REFILLED = re.compile(r"^\s*// \S.*\S {2,}\S")
# A table's row: its name, and where its text begins.
ROW = re.compile(r"^// {3}(?P<name>\S+(?: \S+)*) {2,}\S")


def unguarded(text: str) -> list[str]:
    """Lines that the formatter may fill; an empty one in the place of each other line."""
    lines, guarded = [], False
    for line in text.splitlines():
        if line.strip() in (OFF, ON):
            guarded = line.strip() == OFF
        lines.append("" if guarded else line)
    return lines


def refilled(text: str) -> list[str]:
    """Lines of comments that look like rows of a table which was made a paragraph of."""
    return [line for line in unguarded(text) if REFILLED.match(line)]


def shifted(text: str) -> list[str]:
    """Rows whose text begins in another column than that of the row above them."""
    found, column = [], None
    for line in unguarded(text):
        row = ROW.match(line)
        if row:
            if column not in (None, row.end()):
                found.append(line)
            column = row.end()
        elif not line.startswith("//  "):  # else: a row goes on
            column = None
    return found


def test_no_table_in_a_header_was_refilled() -> None:
    headers = sorted((ROOT / "csrc").rglob("*.h"))
    assert len(headers) > 100
    assert {str(path): lines for path in headers if (lines := refilled(path.read_text()))} == {}


def test_rows_of_tables_in_headers_begin_in_one_column() -> None:
    headers = sorted((ROOT / "csrc").rglob("*.h"))
    assert {str(path): rows for path in headers if (rows := shifted(path.read_text()))} == {}


def test_a_shifted_row_is_found() -> None:
    rows = ["//   seats     how many", "//   witness/<lineage>  the register, and its", "//   last"]
    assert shifted("\n".join(rows)) == [rows[1]]
    assert shifted("\n".join([OFF, *rows, ON])) == []
    assert shifted("//   up    stands\n//         for long\n//   over  ended") == []


def test_formatter_is_turned_on_again_in_every_header() -> None:
    for path in (ROOT / "csrc").rglob("*.h"):
        text = path.read_text()
        assert text.count(OFF) == text.count(ON), path


def test_a_refilled_table_is_found() -> None:
    row = "//   absent   no connection"
    nonsense = "// absent   no connection; up  it stands"
    assert refilled(f"{row}\n{OFF}\n{nonsense}\n{ON}\n{nonsense}\n") == [nonsense]
