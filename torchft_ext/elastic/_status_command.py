"""How is the job? `python -m torchft_ext.elastic status ADDRESS/JOB`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torchft_ext import _C
from torchft_ext.elastic._native import MeetingFields, MemberState, ReportFields, StateFields

__all__ = ["COMMAND", "main"]

COMMAND = "status"
_KEY = "TORCHFT_EXT_ELASTIC_KEY"
_FOUND, _SILENT = 0, 1
_MINUTE, _HOUR = 60, 3600


def main(arguments: Sequence[str]) -> int:
    """Print what a member of the job tells; once, or again and again.

    Returns:
        0: a member of the job answered. 1: none did, or the job is not founded.
    """
    options = _parser().parse_args(arguments)
    try:
        return _watch(options) if options.watch else _look(options)
    except KeyboardInterrupt:
        return _FOUND


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m torchft_ext.elastic {COMMAND}",
        description="Tell how an elastic job is, as one of its members knows it. Takes no place in"
        " the job, changes nothing, and needs no quorum.",
    )
    parser.add_argument(
        "address", nargs="?", default="", help="HOST:PORT/JOB: of the job's store, and its name"
    )
    parser.add_argument(
        "--members",
        default="",
        help=f"HOST:PORT,...: of members, for a job that is found by these; {_KEY} has its key",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object for each look")
    parser.add_argument(
        "--watch", type=float, metavar="SECONDS", help="look again after so long, until Ctrl-C"
    )
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="of one look (10)"
    )
    return parser


def _watch(options: argparse.Namespace) -> int:
    while True:
        _look(options)
        sys.stdout.flush()
        time.sleep(max(options.watch, 0.1))


def _look(options: argparse.Namespace) -> int:
    try:
        state = _C._job_state(
            address=options.address,
            members=[one for one in options.members.split(",") if one],
            key=os.environ.get(_KEY, ""),
            timeout=timedelta(seconds=options.timeout),
        )
    except (ValueError, OverflowError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return _SILENT
    text = json.dumps(state) if options.json else "\n".join(_lines(state))
    print(text)
    report = state["report"]
    return _FOUND if report is not None and report["by_role"] == "member" else _SILENT


def _lines(state: StateFields) -> Iterator[str]:
    report = state["report"]
    if report is None:
        yield _no_answer(state["meeting"])
    else:
        yield from _of_report(report)
    yield f"store: {_of_meeting(state['meeting'])}"
    for one in state["silent"]:
        yield f"asked in vain: {one['host']}, pid {one['pid']}: {one['why']}"


def _no_answer(meeting: MeetingFields) -> str:
    if meeting["founded"]:
        return "did not answer: none of the members that newcomers are told to ask"
    if meeting["trouble"]:
        return "not known: the place where the job is found could not be read"
    return f"not founded yet: {meeting['come']} processes have come"


def _of_meeting(meeting: MeetingFields) -> str:
    if meeting["trouble"]:
        return meeting["trouble"]
    if not meeting["founded"]:
        return "holds no founding of this job"
    text = f"founded by {meeting['founders']}"
    if meeting["contacts"]:
        text += f"; {meeting['contacts']} contacts"
    if meeting["voted_for"] is None:
        return text
    vote = f"view {meeting['voted_for']}" if meeting["voted_for"] else "no view"
    role = "the view's witness" if meeting["is_witness"] else "not the view's witness"
    return f"{text}; {role}; register: {vote}"


def _of_report(report: ReportFields) -> Iterator[str]:
    by = report["by"]
    yield f"told by {by['host']}, pid {by['pid']} ({report['by_role']})"
    if report["by_role"] == "left out":
        yield "  it has been left out of the job, and knows nothing newer"
    yield (
        f"view {report['view']} of lineage {report['lineage']}: {report['size']} members"
        + ("; the next one is being decided" if report["deciding"] else "")
    )
    yield (
        f"rule {report['rule']}, min_size {report['min_size']}, max_size {report['max_size']}: "
        f"any {report['may_lose']} more may be lost at once"
    )
    yield _of_steps(report)
    yield from report["waits"]
    yield from _table(report)
    for change in report["changes"]:
        joined = f"; with {'; '.join(change['joined'])}" if change["joined"] else ""
        gone = f"; without {'; '.join(change['gone'])}" if change["gone"] else ""
        ago = _duration(change["seconds_ago"])
        took = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in change["phases"].items())
        yield (
            f"  {ago} ago: view {change['view']}, {change['size']} members{joined}{gone}"
            + (f"; {took}" if took else "")
        )


def _of_steps(report: ReportFields) -> str:
    steps = report["steps"]
    if steps is None:
        return "step: not known to this member"
    return (
        f"step {steps['committed']}, {steps['per_second']:.3g} a second; the last one "
        f"{_duration(steps['seconds_ago'])} ago"
    )


def _table(report: ReportFields) -> Iterator[str]:
    rows = [("rank", "host", "pid", "since view", "for", "part", "may be lost", "state")]
    for rank, member in enumerate(report["members"]):
        part = "voter" if member["voter"] else "learner"
        may = "yes" if member["may_be_lost"] else "no"
        rows.append(_row(str(rank), member, part, may, _state(member)))
    full = report["size"] >= report["max_size"]
    for member in report["waiting"]:
        rows.append(_row("-", member, "spare" if full else "newcomer", "yes", "waits"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("  " + "  ".join(cells)).rstrip()


def _row(
    rank: str, member: MemberState, part: str, may: str, state: str
) -> tuple[str, str, str, str, str, str, str, str]:
    since = str(member["since_view"]) if member["since_view"] else "-"
    present = _duration(member["seconds"]) if member["since_view"] else "-"
    return rank, member["host"], str(member["pid"]), since, present, part, may, state


def _state(member: MemberState) -> str:
    """Its own port's word counts; what another member knows of it may be older."""
    if member["answers"] is None:
        return member["trouble"] or "not asked"
    if not member["answers"]:
        return "did not answer" + (f" ({member['trouble']})" if member["trouble"] else "")
    return f"answers ({member['trouble']})" if member["trouble"] else "answers"


def _duration(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.1f} min"
    return f"{seconds / _HOUR:.1f} h"
