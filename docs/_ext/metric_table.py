"""The table of metrics in docs/reference/metrics.md: `python docs/_ext/metric_table.py` writes it.

A test compares the page with what this makes.
"""

from __future__ import annotations

from pathlib import Path

from torchft_ext._metric_families import FAMILIES, PREFIX

PAGE = Path(__file__).resolve().parents[1] / "reference" / "metrics.md"
_BEGIN, _END = "<!-- the table begins -->\n", "<!-- the table ends -->\n"
_HEAD = "```{list-table}\n:header-rows: 1\n\n* - metric\n  - kind\n  - labels\n  - help\n"


def table() -> str:
    """Return the table in MyST's Markdown."""
    rows = []
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        name = f"* - `{PREFIX}{family.name}`\n  - {family.kind}\n"
        rows.append(f"{name}  - {labels}".rstrip() + f"\n  - {family.help}\n")
    return _HEAD + "".join(rows) + "```\n"


def with_table(page: str) -> str:
    """Return the page with the table in its place."""
    before, _, rest = page.partition(_BEGIN)
    after = rest.partition(_END)[2]
    return before + _BEGIN + table() + _END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
