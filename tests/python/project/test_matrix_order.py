"""A sample of the failure matrix (tests/matrix) ends no rank that a later case could go on with."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))

from matrix.__main__ import attempt
from matrix.plan import Entry, axes_of, cover, everything
from matrix.process import SkippedError
from matrix.report import Report
from matrix.strikes import STORE_STRIKES


class FakePool:
    """Counts the stores that were begun anew, with which all ranks end."""

    def __init__(self) -> None:
        self.taken: list[object] = [object()]  # of the case before
        self.new_stores = 0

    def new_store(self) -> None:
        self.new_stores += 1


def skip(pool: FakePool, taken: list[object]) -> float:
    pool.taken = taken or pool.taken
    raise SkippedError("not on this machine")


@pytest.mark.parametrize(("taken", "ended"), [([], 0), ([object()], 1)])
def test_a_skipped_case_ends_ranks_only_if_it_took_some(taken: list[object], ended: int) -> None:
    pool, report = FakePool(), Report(1, None)
    entry = Entry("a", "b", 2, frozenset(), lambda pool: skip(pool, taken))
    attempt(pool, report, entry)
    assert (len(report.skipped), pool.new_stores) == (1, ended)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_sample_has_every_value_and_the_stores_cases_last(seed: int) -> None:
    entries = everything(seed)
    sample = cover(entries, random.Random(seed))
    assert axes_of(sample) == axes_of(entries)
    of_the_store = [entry.strike in STORE_STRIKES for entry in sample]
    assert of_the_store == sorted(of_the_store) and any(of_the_store)
