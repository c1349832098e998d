"""A plugin of pytest: prints a failure immediately, since a step may not reach its end."""

from __future__ import annotations

import sys

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid} ({report.when}):\n{report.longreprtext}", file=sys.stderr)
