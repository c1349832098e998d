"""What scripts/conformance.sh makes of runs of torch's own suite."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conformance.expected import Expected, StaleError, read
from conformance.report import Comparison, compare, describe
from conformance.runs import Result
from conformance.suite import needs_gpu

ROW = Expected("ft", "test_b", "torch/x.py:3: if name != 'gloo':", ours=False)


def compared(outcome: str, expected: list[Expected], repeated: bool = False) -> Comparison:
    """Of two tests on gloo and on ft, where the second one has this outcome on ft."""
    gloo = [Result(name, "passed", 0.1, "") for name in ("test_a", "test_b")]
    ft = [gloo[0], Result("test_b", outcome, 0.1, "Traceback", repeated)]
    return compare({"gloo": gloo, "ft": ft}, expected)


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_difference_that_nobody_expects_is_no_success_and_shows_its_traceback(outcome):
    found = compared(outcome, [])
    assert not found.as_expected
    assert f"NOT EXPECTED ft: test_b ({outcome})\n      Traceback" in describe(found)


def test_expected_difference_is_a_success_and_shows_the_line_that_refuses():
    found = compared("failed", [ROW])
    assert found.as_expected
    assert "ft: test_b\n      torch/x.py:3: if name != 'gloo':" in describe(found)


def test_row_of_a_test_that_passes_is_no_success():
    found = compared("passed", [ROW])
    assert not found.as_expected
    assert "STALE, passes now: ft: test_b" in describe(found)


def test_second_try_that_passes_is_a_success_and_is_named():
    found = compared("passed", [], repeated=True)
    assert found.as_expected
    assert found.repeated == ["ft: test_b"]


def test_run_in_which_nothing_passes_is_no_success():
    gloo = [Result("test_a", "skipped", 0.1, "")]
    assert not compare({"gloo": gloo, "ft": []}, []).as_expected


def test_row_that_quotes_a_line_which_torch_does_not_have_is_refused(tmp_path):
    (tmp_path / "expected.toml").write_text(
        '[[torch]]\nways = ["ft"]\ntests = ["test_b"]\n'
        'file = "torch/version.py"\nafter = "def gone():"\nline = "if name == gloo:"\n'
    )
    with pytest.raises(StaleError, match=r"torch/version\.py of this torch has no line 'if name"):
        read(Path(torch.__file__).parent, tmp_path / "expected.toml")


def test_every_row_of_the_list_quotes_a_connection_of_the_torch_that_is_installed():
    rows = read(Path(torch.__file__).parent)
    assert len({(row.way, row.test) for row in rows}) == len(rows)
    assert all(row.refused_by for row in rows)


def test_only_a_decorator_that_asks_for_a_gpu_keeps_a_test_from_being_run():
    code = "def {0}(allow_cpu):\n def wrapper(): return allow_cpu\n return wrapper\n"
    made: dict = {}
    for name in ("skip_if_lt_x_gpu", "skip_if_no_gpu", "with_dist_debug_levels"):
        exec(code.format(name), made)
    assert needs_gpu(made["skip_if_no_gpu"](False))
    assert needs_gpu(made["skip_if_lt_x_gpu"](False))
    assert not needs_gpu(made["skip_if_lt_x_gpu"](True))
    assert not needs_gpu(made["with_dist_debug_levels"](False))
