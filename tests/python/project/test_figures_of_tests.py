"""The figures in docs/how_it_is_tested.md are about those of the tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tests"))

from matrix.plan import everything  # noqa: E402

PAGE = (ROOT / "docs" / "how_it_is_tested.md").read_text()


def figure(words: str) -> int:
    """The number in the page's words, which have one group for it."""
    (number,) = re.findall(words, PAGE)
    return int(number.replace(",", ""))


def test_page_says_about_how_many_cases_the_matrix_has() -> None:
    cases = len(everything(seed=1))
    assert abs(figure(r"some ([\d,]+) cases\n") - cases) < cases / 10


def test_page_says_how_many_targets_are_fuzzed() -> None:
    script = (ROOT / "scripts" / "fuzz.sh").read_text()
    (targets,) = re.findall(r"^parsers=\(([^)]*)\)", script, re.M)
    assert figure(r"- (\d+) targets\n") == len(targets.split())


def test_page_says_how_many_worlds_and_rules_the_model_checker_has() -> None:
    model = (ROOT / "tests" / "cpp" / "elastic" / "elastic_model_test.cpp").read_text()
    names = re.findall(r"^TEST\(ElasticModel, (\w+)\)", model, re.M)
    taken_out = [name for name in names if name.startswith("Misses")]
    assert figure(r"- (\d+) kinds of worlds\n") == len(names) - len(taken_out)
    words = {6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten"}
    assert f"So {words[len(taken_out)]} rules of the first protocol" in PAGE
