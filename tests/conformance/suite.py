"""Runs torch's own distributed_test in one of three ways, in forked ranks; one line of JSON a test.

Run as ``python -m conformance.suite WAY [TEST...]`` with tests/ on the path, in a process of its
own: which backend the suite tests is read when it is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import re
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from typing import Any

WORLD_SIZE = 3  # of two, torch skips tests of subgroups; more processes are slower on few cores
SECONDS_A_TEST = 90
WAYS = {
    "gloo": "torch's gloo, for comparison",
    "ft": 'the suite\'s backend is "ft"',
    "ft_as_gloo": "the suite believes that it runs gloo, which replace_gloo() has replaced",
}


def load(way: str) -> type[unittest.TestCase]:
    """The class of the suite's tests, of that way."""
    os.environ.update(
        BACKEND="gloo",  # its decorators choose by name: they are to choose what gloo can do
        WORLD_SIZE=str(WORLD_SIZE),
        CUDA_VISIBLE_DEVICES="",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(SECONDS_A_TEST),
        OMP_NUM_THREADS="1",
    )
    internal = "torch.testing._internal"
    common: Any = importlib.import_module(f"{internal}.common_distributed")
    suite: Any = importlib.import_module(f"{internal}.distributed.distributed_test")
    fork = multiprocessing.get_context("fork").Process

    common.TIMEOUT_OVERRIDE.clear()
    # Ranks meet through files and give one another ten seconds: more on a machine that is busy.
    barrier = suite.Barrier.sync.__func__
    barrier.__defaults__ = (None, SECONDS_A_TEST / 3)
    if way == "ft":
        suite.BACKEND = os.environ["BACKEND"] = "ft"
    elif way == "ft_as_gloo":
        importlib.import_module("torchft_ext").replace_gloo()

    class Forked(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(fork)

    return Forked


def needs_gpu(test: Callable[..., Any] | None) -> bool:
    """Whether one of the test's decorators skips it, in each rank, for want of a GPU."""
    while test is not None:
        code = test.__code__
        if code.co_qualname.startswith("skip_if_no_gpu."):
            return True
        if code.co_qualname.startswith("skip_if_lt_x_gpu."):
            held = dict(zip(code.co_freevars, test.__closure__ or (), strict=True))
            return not ("allow_cpu" in held and held["allow_cpu"].cell_contents)
        test = getattr(test, "__wrapped__", None)
    return False


class Outcome(unittest.TestResult):
    """What became of one test."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome = "passed"
        self.detail = ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.outcome, self.detail = "skipped", reason

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.outcome, self.detail = "failed", first_rank(str(err[1]))

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.addError(test, err)


def first_rank(text: str) -> str:
    """Of the tracebacks of several ranks the first, without C++ frames."""
    text = re.split(r"\nProcess \d+ exited with error code", text)[0]
    text = re.split(r"\nException raised from |\nC\+\+ Captured|\nTo execute this test", text)[0]
    return text.strip()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What ranks print goes nowhere: tests that provoke errors print thousands of lines."""
    sys.stdout.flush()
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stdout.flush()
        for number, saved in enumerate(kept, 1):
            os.dup2(saved, number)
            os.close(saved)
        os.close(nowhere)


def run(case: type[unittest.TestCase], name: str) -> dict[str, Any]:
    began = time.monotonic()
    result = Outcome()
    if needs_gpu(getattr(case, name)):
        result.outcome, result.detail = "skipped", "needs a GPU"
    else:
        case(name).run(result)
    return {
        "test": name,
        "outcome": result.outcome,
        "seconds": round(time.monotonic() - began, 2),
        "detail": result.detail,
    }


def main() -> None:
    way, *chosen = sys.argv[1:]
    case = load(way)
    names = chosen or unittest.defaultTestLoader.getTestCaseNames(case)
    print(json.dumps({"tests": len(names)}), flush=True)
    for name in names:
        with quiet():
            result = run(case, name)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
