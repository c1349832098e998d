"""Runs torch's own distributed_test on gloo and on "ft", and compares what passes.

Run by scripts/conformance.sh; ``python -m conformance`` with tests/ on the path. Exit status 1
where the differences are not those of expected.toml: more of them, or fewer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path

import torch

from conformance.expected import Expected, read
from conformance.report import Comparison, compare, describe
from conformance.runs import Result, run
from conformance.suite import WAYS, WORLD_SIZE

TORCH = Path(torch.__file__).parent


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result for machines")
    parser.add_argument(
        "--no-expected",
        action="store_true",
        help="expect no difference at all: prints each in full",
    )
    parser.add_argument("tests", nargs="*", metavar="TEST", help="some tests only (default: all)")
    return parser.parse_args()


def record(results: dict[str, list[Result]], found: Comparison) -> dict[str, object]:
    """What --json writes."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "world_size": WORLD_SIZE,
        "counts": {way: found.counts[way] for way in WAYS},
        "differences": [vars(difference) for difference in found.differences],
        "stale": found.stale,
        "repeated": found.repeated,
        "as_expected": found.as_expected,
        "results": {way: [vars(result) for result in results[way]] for way in WAYS},
    }


def main() -> int:
    """Run, compare, print."""
    args = arguments()
    expected: list[Expected] = [] if args.no_expected else read(TORCH)
    if args.tests:
        expected = [row for row in expected if row.test in args.tests]
    results = {"gloo": run("gloo", args.tests, set())}
    passed = [result.test for result in results["gloo"] if result.outcome == "passed"]
    for way in ("ft", "ft_as_gloo"):  # what gloo does not pass there is nothing to compare with
        known = {row.test for row in expected if row.way == way}
        results[way] = run(way, passed, known) if passed else []
    found = compare(results, expected)
    print(describe(found))
    if args.json is not None:
        args.json.write_text(json.dumps(record(results, found), indent=1) + "\n")
        print(f"the whole result: {args.json}")
    return 0 if found.as_expected else 1


if __name__ == "__main__":
    sys.exit(main())
