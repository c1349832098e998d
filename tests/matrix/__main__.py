"""The failure matrix: what can happen to ranks x when x in which world, on ranks without Python.

Run as ``python -m matrix --rank EXECUTABLE`` with tests/ on the path. Exit status 1 if a case failed.
The whole takes about half an hour on two cores: --shard divides it, --done lets it be
interrupted.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from matrix.cases import Pool
from matrix.lateness import LateError
from matrix.plan import Entry, axes_of, cover, everything, shard
from matrix.process import MatrixError, RankProcess, SkippedError
from matrix.report import Report
from matrix.strangers import run_strangers


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", required=True, type=Path, help="the built torchft_ext_rank")
    parser.add_argument(
        "--sample", action="store_true", help="a random part that holds every value of every axis"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="of a sample (default 8); what holds every value is run in any case",
    )
    parser.add_argument("--seed", type=int, default=None, help="of all chance; printed")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="this part of N like ones")
    parser.add_argument(
        "--done",
        type=Path,
        metavar="FILE",
        help="note passed cases there; skip those noted there; removed once all have passed",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="factor on all time bounds (sanitizers: 10), and on the heartbeat limit of more than 4 ranks",
    )
    parser.add_argument(
        "--only", default="", help="cases whose name OPERATION/WORLD/VICTIM/STRIKE contains this"
    )
    parser.add_argument(
        "--shared", action="store_true", help="collectives in shared memory; else over sockets"
    )
    parser.add_argument("--world", type=int, default=0, help="cases of this world size only")
    parser.add_argument(
        "--strangers", type=int, default=0, metavar="N", help="instead: N hostile connections"
    )
    parser.add_argument("--list", action="store_true", help="print the cases' names, run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return parser.parse_args()


def chosen(options: argparse.Namespace, rng: random.Random, seed: int) -> tuple[list[Entry], int]:
    """The cases to run, and how many of them, from the first, must run whatever the time."""
    entries = [e for e in everything(seed) if options.only in e.title]
    entries = [e for e in entries if options.world in (0, e.world)]
    entries = shard(entries, options.shard)
    if options.sample:
        first = cover(entries, rng)
        rest = [e for e in rng.sample(entries, len(entries)) if e not in set(first)]
        return first + rest, len(first)
    if options.done is not None and options.done.exists():
        done = set(options.done.read_text(encoding="utf-8").split("\n"))
        entries = [e for e in entries if e.name not in done]
    return entries, len(entries)


def attempt(pool: Pool, report: Report, entry: Entry, *, again: bool = False) -> None:
    """One case; where it failed, or was skipped in its midst, the next one begins with fresh ranks.

    Once more where it was late for want of a core (see lateness); again: this is that time.
    """
    pool.taken = []
    try:
        report.add_passed(entry.name, entry.strike, entry.run(pool))
    except LateError as late:
        told = f"{late} ({pool.transports()})"
        pool.new_store()
        if again or not late.starved:
            report.add_failed(entry.title, told)
        else:
            report.add_repeated(entry.title, told)
            attempt(pool, report, entry, again=True)
    except SkippedError as reason:
        report.add_skipped(entry.title, str(reason))
        if pool.taken:
            pool.new_store()
    except MatrixError as error:
        report.add_failed(entry.title, f"{error} ({pool.transports()})")
        pool.new_store()


def run_cases(options: argparse.Namespace, pool: Pool, seed: int) -> Report:
    """What the command line says, but for strangers."""
    entries, needed = chosen(options, pool.rng, seed)
    report = Report(len(entries), options.done)
    until = time.monotonic() + options.minutes * 60
    for number, entry in enumerate(entries):
        if number >= needed and time.monotonic() > until:
            break
        attempt(pool, report, entry)
    if options.sample:
        values, all_values = axes_of(entries[: report.done]), axes_of(entries)
        print(f"the sample holds {len(values)} of {len(all_values)} values of the axes")
        if values != all_values:
            report.add_failed("sample", f"lacks {sorted(map(str, all_values - values))}")
    print(report.text(seed))
    if options.json:
        report.write(options.json, seed)
    if options.done is not None and not options.sample and not report.failed:
        options.done.unlink(missing_ok=True)
    return report


def main() -> int:
    """Run what the command line says."""
    options = arguments()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**31)
    rng = random.Random(seed)
    if options.list:
        print("\n".join(entry.title for entry in chosen(options, rng, seed)[0]))
        return 0
    print(f"matrix: --seed {seed}", file=sys.stderr)
    RankProcess.shared = options.shared
    pool = Pool((str(options.rank.resolve()),), options.scale, rng)
    try:
        if options.strangers:
            return run_strangers(pool, options.strangers)
        return 1 if run_cases(options, pool, seed).failed else 0
    except MatrixError as error:
        print(f"FAILED {error}", file=sys.stderr)
        return 1
    finally:
        pool.drop()
        pool.store.end()


if __name__ == "__main__":
    sys.exit(main())
