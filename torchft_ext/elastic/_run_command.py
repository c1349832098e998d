"""python -m torchft_ext.elastic run: a script as a worker of a job, with an exit code that tells.

The script finds itself in a job: elastic.steps() and elastic.current_job() know it. It runs as
__main__, and again from its first line where the process was left out and joins again.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta

from torchft_ext.elastic._exits import Exit, exit_code_of
from torchft_ext.elastic._job import Job
from torchft_ext.elastic._run import JoinOptions, run

_EPILOG = (
    "exit codes: 0 the job is over; 75 left by SIGTERM before that; 69 no store, or members did not"
    " come in time; 70 hung, and supervised; 80 no quorum; 81 state lost; 82 diverged; 83 no"
    " progress; 84 repeated; 1 or the script's own: any other error. 80 to 84:"
    " starting again does not help."
)


def main(arguments: Sequence[str]) -> int:
    """Run the script until the job is over; return the exit code."""
    given = _parser().parse_args(arguments)
    before = list(sys.argv)
    sys.argv[:] = [given.script, *given.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(given.script)))
    try:
        script = _Script(given.script)
        return run(script, given.address, supervise=given.supervise, **_options(given))
    except SystemExit as error:
        return _code_of_exit(error)
    except Exception as error:
        code = exit_code_of(error)
        traceback.print_exc()
        print(f"torchft_ext.elastic run: exit code {int(code)}: {code.name}", file=sys.stderr)
        return code
    finally:
        sys.argv[:] = before


class _Script:
    """What run() calls: the script, from its first line."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, job: Job) -> None:
        """Run it. sys.exit() without a code returns, as the last line does."""
        try:
            runpy.run_path(self._path, run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                raise


def _code_of_exit(error: SystemExit) -> int:
    """As the interpreter does it: a text is printed, and the code is 1."""
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return Exit.FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchft_ext.elastic run",
        description="Join the job, run a training script in it, join again when left out, leave"
        " after the step on SIGTERM.",
        epilog=_EPILOG,
    )
    parser.add_argument("address", help="host:port/name of the job's store, and the job")
    parser.add_argument("script", help="uses elastic.steps() without a join()")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.add_argument("--size", type=int, required=True, help="how many found the job")
    parser.add_argument("--min-size", type=int, help="fewer do not train; default: size")
    parser.add_argument("--max-size", type=int, help="more wait as spares")
    parser.add_argument("--rule", choices=("members", "store"), default="members")
    parser.add_argument("--timeout", type=float, default=300.0, help="of the job, in seconds")
    parser.add_argument("--limit", type=float, default=5.0, help="of silence, in seconds")
    parser.add_argument("--interface", help="the network interface to listen on")
    parser.add_argument("--port-range", help="of TCP ports to listen on, as 7000-7100")
    parser.add_argument("--wait", action="store_true", help="for the first view, before the script")
    parser.add_argument("--on-no-quorum", choices=("raise", "wait"), default="raise")
    parser.add_argument("--supervise", action="store_true", help="start a hung script again")
    return parser


def _options(given: argparse.Namespace) -> JoinOptions:
    return JoinOptions(
        size=given.size,
        min_size=given.min_size,
        max_size=given.max_size,
        rule=given.rule,
        timeout=timedelta(seconds=given.timeout),
        limit=timedelta(seconds=given.limit),
        interface=given.interface,
        port_range=given.port_range,
        wait=given.wait,
        on_no_quorum=given.on_no_quorum,
    )
