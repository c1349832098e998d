"""scripts/check_benchmarks.py refuses what a benchmark must not write, and nothing else."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def load_checker() -> ModuleType:
    path = ROOT / "scripts" / "check_benchmarks.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checker = load_checker()


def summary_of(written: dict) -> dict:
    return next(checker.summaries_in(written["results"]))


WRONG: dict[str, Callable[[dict], object]] = {
    "no machine": lambda written: written.pop("machine"),
    "calls itself 'other'": lambda written: written.update(benchmark="other"),
    "a path": lambda written: written["arguments"].update(json="/tmp/written.json"),
    "no results": lambda written: written.update(results=[]),
    "negative": lambda written: written["results"][0].update(extra=-1.0),
    "no number": lambda written: written["results"][0].update(extra=float("nan")),
    "impossible statistics": lambda written: summary_of(written).update(median=1e9),
}


def rivals_of(*ops: str, sources: tuple[str, ...] = ("ft", "gloo", "limit")) -> dict:
    seconds = {source: {"median": 1.0} for source in sources}
    return {"results": [{"op": op, "seconds": seconds} for op in ops]}


def test_what_a_brief_run_lacks_is_named() -> None:
    everything = ("allreduce", "alltoall", "barrier")
    assert checker.gaps_in("rivals", rivals_of(*everything)) == []
    assert "'op'" in checker.gaps_in("rivals", rivals_of("barrier"))[0]
    without = rivals_of(*everything, sources=("ft", "limit"))
    assert "gloo" in checker.gaps_in("rivals", without)[0]


def test_a_picture_that_is_none_is_refused(tmp_path: Path) -> None:
    picture = tmp_path / "rivals.png"
    assert "not drawn" in checker.trouble_with_picture(picture)[0]
    picture.write_bytes(checker.PNG)
    assert "no picture" in checker.trouble_with_picture(picture)[0]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results_of_the_repository_are_accepted(path: Path) -> None:
    written = json.loads(path.read_text())
    assert checker.troubles_with(written["benchmark"], written) == []
    if written["benchmark"] not in checker.RATES_ALONE:
        assert list(checker.summaries_in(written["results"])), "no statistics were looked at"


@pytest.mark.parametrize("trouble", WRONG)
def test_wrong_results_are_refused(trouble: str) -> None:
    written = json.loads(RESULTS[0].read_text())
    name = written["benchmark"]
    WRONG[trouble](written)
    assert trouble in " ".join(checker.troubles_with(name, written))
