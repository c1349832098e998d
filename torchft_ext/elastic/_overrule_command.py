"""python -m torchft_ext.elastic overrule: an operator lets one member go on without a quorum."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta

from torchft_ext.elastic._overrule import Orders, client_of

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Give the order, and wait for the member that takes it; return the exit code: 1 for none."""
    given = _parser().parse_args(arguments)
    within = timedelta(seconds=given.timeout)
    try:
        store = client_of(given.address, within)
    except (RuntimeError, ValueError) as error:
        return _refuse(f"{error}; expected the address of the job's store")
    if not store.check(["founding"]):
        return _refuse(f"{given.address}: there is no job of this name")
    orders = Orders(store)
    orders.give(given.view)
    taker = orders.taker(given.view, within)
    if taker is None:
        return _refuse(
            f"no member waits for a word on view {given.view}; the log of a member that waits "
            "names the view"
        )
    print(f"member {taker} goes on alone from view {given.view}; the others join it anew")
    return 0


def _refuse(why: str) -> int:
    print(f"torchft_ext.elastic overrule: {why}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchft_ext.elastic overrule",
        description="Let one member of a job that has lost its quorum go on alone. Do it once you"
        " know that the missing members have ended: if they have a quorum of their own, the job"
        " exists twice.",
    )
    parser.add_argument("address", help="host:port/name of the job's store, and the job")
    parser.add_argument("--view", type=int, required=True, help="the last view, as the log has it")
    parser.add_argument("--timeout", type=float, default=30.0, help="for a member, in seconds")
    return parser
