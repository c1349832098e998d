"""Tables in comments of headers keep their columns: clang-format refills paragraphs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OFF, ON = "// clang-format off", "// clang-format on"
# A paragraph in which two spaces are left of a table's column.
REFILLED = re.compile(r"^\s*// \S.*\S {2,}\S")


def refilled(text: str) -> list[str]:
    """Lines of comments that look like rows of a table which was made a paragraph of."""
    found, guarded = [], False
    for line in text.splitlines():
        if line.strip() in (OFF, ON):
            guarded = line.strip() == OFF
        elif not guarded and REFILLED.match(line):
            found.append(line)
    return found


def test_no_table_in_a_header_was_refilled() -> None:
    headers = sorted((ROOT / "csrc").rglob("*.h"))
    assert len(headers) > 100
    assert {str(path): lines for path in headers if (lines := refilled(path.read_text()))} == {}


def test_formatter_is_turned_on_again_in_every_header() -> None:
    for path in (ROOT / "csrc").rglob("*.h"):
        text = path.read_text()
        assert text.count(OFF) == text.count(ON), path


def test_a_refilled_table_is_found() -> None:
    row = "//   absent   no connection"
    nonsense = "// absent   no connection; up  it stands"
    assert refilled(f"{row}\n{OFF}\n{nonsense}\n{ON}\n{nonsense}\n") == [nonsense]
