"""Compares the runs with one another and with what is expected."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from conformance.expected import Expected
from conformance.runs import Result


@dataclass(frozen=True)
class Difference:
    """A test that passed on gloo and not in this way.

    Attributes:
        refused_by: the line of torch that refuses, or the fault of this package; empty where the
            difference is not expected.
    """

    way: str
    test: str
    outcome: str
    refused_by: str
    ours: bool
    detail: str


@dataclass
class Comparison:
    """What compare() found.

    Attributes:
        stale: rows, as "way: test", of tests that pass.
        repeated: tests, as "way: test", that passed at the second try.
    """

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)

    @property
    def new(self) -> list[Difference]:
        """Those that nobody expected."""
        return [difference for difference in self.differences if not difference.refused_by]

    @property
    def as_expected(self) -> bool:
        """Whether the differences are those of the list, and no test is left out."""
        ran = all(counts.get("passed", 0) for counts in self.counts.values())
        return ran and not self.new and not self.stale


def compare(results: dict[str, list[Result]], expected: list[Expected]) -> Comparison:
    """The differences from gloo, and the rows that none of them is."""
    found = Comparison()
    known = {(row.way, row.test): row for row in expected}
    for way, of_way in results.items():
        found.counts[way] = {}
        for result in of_way:
            found.counts[way][result.outcome] = found.counts[way].get(result.outcome, 0) + 1
            if result.repeated and result.outcome == "passed":
                found.repeated.append(f"{way}: {result.test}")
            if way == "gloo" or result.outcome == "passed":
                continue
            row = known.pop((way, result.test), None)
            where, ours = (row.refused_by, row.ours) if row else ("", False)
            found.differences.append(
                Difference(way, result.test, result.outcome, where, ours, result.detail)
            )
    found.stale = [f"{way}: {test}" for way, test in known]
    return found


def describe(found: Comparison) -> str:
    """The comparison for people."""
    lines = []
    for way, counts in found.counts.items():
        lines.append(f"{way}: {counts.get('passed', 0)} pass of {sum(counts.values())}")
    for title, chosen in (
        (
            "torch's own checks refuse",
            [d for d in found.differences if d.refused_by and not d.ours],
        ),
        ("faults of this package that are known", [d for d in found.differences if d.ours]),
    ):
        if chosen:
            lines.append(f"{title}:")
            lines += [f"  {d.way}: {d.test}\n      {d.refused_by}" for d in chosen]
    lines += [f"passed at the second try: {name}" for name in found.repeated]
    for difference in found.new:
        lines.append(f"NOT EXPECTED {difference.way}: {difference.test} ({difference.outcome})")
        lines.append(textwrap.indent(difference.detail, "      "))
    lines += [f"STALE, passes now: {row}: remove the row from expected.toml" for row in found.stale]
    lines.append("as expected" if found.as_expected else "NOT as expected (expected.toml)")
    return "\n".join(lines)
