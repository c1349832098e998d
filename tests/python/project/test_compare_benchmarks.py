"""benchmarks/compare.py names what got slower, and nothing that only varied."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
OLD = ROOT / "benchmarks" / "results" / "configure-cpu.json"


def load() -> ModuleType:
    path = ROOT / "benchmarks" / "compare.py"
    spec = importlib.util.spec_from_file_location("compare_benchmarks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_benchmarks"] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


compare = load()


def changed(tmp_path: Path, median: float, least: float) -> Path:
    """Write the old results with other times of the first row."""
    results = copy.deepcopy(json.loads(OLD.read_text()))
    times = results["results"][0]["seconds"]
    times["median"] *= median
    times["min"] *= least
    path = tmp_path / OLD.name
    path.write_text(json.dumps(results))
    return path


def test_a_time_whose_median_and_minimum_have_grown_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([str(OLD), str(changed(tmp_path, 1.5, 1.2))]) == 1
    said = capsys.readouterr().out
    assert "configure: slower by 50%: engine=ft world=2 seconds:" in said
    assert said.count("slower by") == 1


@pytest.mark.parametrize(("median", "least"), [(1.0, 1.0), (1.5, 1.0), (1.0, 1.5), (0.5, 0.5)])
def test_what_varied_or_got_faster_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], median: float, least: float
) -> None:
    assert compare.main([str(OLD), str(changed(tmp_path, median, least))]) == 0
    assert "slower by" not in capsys.readouterr().out


def test_directories_are_compared_by_the_names_of_their_files(tmp_path: Path) -> None:
    changed(tmp_path, 3, 3)
    assert compare.main([str(OLD.parent), str(tmp_path)]) == 1


def test_results_of_two_benchmarks_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not of 'configure'"):
        compare.main([str(OLD), str(OLD.with_name("allreduce-cpu.json"))])
    with pytest.raises(SystemExit, match="no file in common"):
        compare.main([str(OLD.parent), str(tmp_path)])
