"""Says in one sentence for each failed generation who ended it, and where.

    python -m torchft_ext.analyze DIRECTORY

DIRECTORY has the JSON files that processes wrote under TORCH_FR_DUMP_TEMP_FILE, of all hosts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchft_ext._records import Collective, Failure, Generation, read_folder

__all__ = ["Verdict", "judge", "main"]

_LOST = ("peer lost", "peer left", "connection lost")
_SECOND = 1_000_000_000


@dataclass(frozen=True)
class Verdict:
    """Who ended a generation.

    Attributes:
        kind: "other operation", "fewer operations", "lost", "ended" or "unclear".
        ranks: that did; may be empty.
        collective: the number of the one in which the others waited; None: in none.
        sentence: the same in words.
    """

    kind: str
    ranks: list[int]
    collective: int | None
    sentence: str


def judge(generation: Generation) -> Verdict:
    """Return who ended a generation, from the records of its ranks.

    Ranks that have issued different collectives under one number come first, since what follows
    from that may look like anything else; where as many have issued the one as the other, all of
    them are named. Then the cause that the ranks' failures name. Of a
    timeout, the ranks that have issued fewer collectives than the others, or have written nothing.
    """
    return _other_operation(generation) or _named_cause(generation) or _fewer(generation)


def _other_operation(generation: Generation) -> Verdict | None:
    issued: dict[int, dict[tuple[object, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, record in sorted(generation.ranks.items()):
        for number, collective in record.collectives.items():
            issued[number][collective.signature].append(rank)
    numbers = [number for number, kinds in issued.items() if len(kinds) > 1]
    if not numbers:
        return None
    number = min(numbers)
    by_count = sorted(issued[number].values(), key=len)
    few, many = by_count[:-1], by_count[-1]
    if len(few[-1]) == len(many):  # which of them is wrong the records do not show
        few, many = by_count, []
    sentence = "; ".join(_issued(generation, ranks, number) for ranks in few)
    if many:
        sentence += f", where {_plain(many)} issued {_described(generation, many[0], number)}"
    else:
        sentence = f"ranks differ: {sentence}"
    absent = sorted(set(range(generation.size)).difference(*few, many))
    if absent and not many:
        sentence += f"; of {_plain(absent)} there is no collective {number}"
    return Verdict(
        "other operation", sorted(rank for ranks in few for rank in ranks), number, sentence
    )


def _issued(generation: Generation, ranks: list[int], number: int) -> str:
    return f"{_named(generation, ranks)} issued {_described(generation, ranks[0], number)}"


def _described(generation: Generation, rank: int, number: int) -> str:
    collective = generation.ranks[rank].collectives[number]
    rooted = collective.name in ("broadcast", "reduce", "gather", "scatter")
    root = f" from root {collective.root}" if rooted else ""
    return f"{collective} of {collective.items} {collective.dtype}{root}"


def _named_cause(generation: Generation) -> Verdict | None:
    causes = [one for one in generation.failures if one.kind != "timeout"]
    if not causes:
        return None
    kind, rank = Counter((one.kind, one.rank) for one in causes).most_common(1)[0][0]
    cause = next(one for one in causes if (one.kind, one.rank) == (kind, rank))
    who = _named(generation, [rank]) if rank >= 0 else "a rank that is not known"
    waiting = _first_undone(generation, {rank})
    place = f", while {_plain(waiting[1])} waited in {waiting[0]}" if waiting else ""
    ranks = [rank] if rank >= 0 else []
    number = waiting[0].number if waiting else None
    if kind in _LOST:
        return Verdict("lost", ranks, number, f"{who} was lost: {cause.how}{place}")
    return Verdict("ended", ranks, number, f"{who} ended it: {cause.how}{place}")


def _first_undone(generation: Generation, without: set[int]) -> tuple[Collective, list[int]] | None:
    """Return the first collective that did not complete, and the ranks that had issued it."""
    undone: dict[int, list[int]] = defaultdict(list)
    for rank, record in sorted(generation.ranks.items()):
        for number, collective in record.collectives.items():
            if rank not in without and collective.state != "completed":
                undone[number].append(rank)
    if not undone:
        return None
    ranks = undone[min(undone)]
    return generation.ranks[ranks[0]].collectives[min(undone)], ranks


def _fewer(generation: Generation) -> Verdict:
    waiting = _first_undone(generation, set())
    if waiting is None:
        return Verdict("unclear", [], None, "no collective was under way on the ranks that wrote")
    collective, waiters = waiting
    behind = [
        rank
        for rank, record in generation.ranks.items()
        if record.last is None or record.last.number < collective.number
    ]
    silent = sorted(set(range(generation.size)) - set(generation.ranks))
    where = f"{_plain(waiters)} waited in {collective}"
    parts = [_what_it_issued(generation, rank) for rank in sorted(behind)]
    if silent:
        parts.append(f"{_named(generation, silent)} wrote no record: it is frozen or has ended")
    if not parts:
        return Verdict(
            "unclear", [], collective.number, f"{where}, which all ranks had issued: it was slow"
        )
    ranks = sorted([*behind, *silent])
    return Verdict(
        "fewer operations", ranks, collective.number, f"{'; '.join(parts)}, while {where}"
    )


def _what_it_issued(generation: Generation, rank: int) -> str:
    record = generation.ranks[rank]
    who = _named(generation, [rank])
    if record.last is None:
        return f"{who} had issued no collective"
    text = f"{who} had issued no collective after {record.last}"
    return text + _before(record.failure, record.last)


def _before(failure: Failure | None, last: Collective) -> str:
    if failure is None:
        return ""
    return f", {max(0.0, (failure.time_ns - last.issued_ns) / _SECOND):.1f} s before the failure"


def _plain(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 1 and 2"."""
    words = [str(rank) for rank in ranks]
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def _named(generation: Generation, ranks: list[int]) -> str:
    """With the processes."""
    words = [f"rank {rank} ({generation.members[rank]})" for rank in ranks]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _report(generation: Generation) -> dict[str, object]:
    verdict = judge(generation)
    return {
        "group": generation.group,
        "generation": generation.number,
        "id": generation.id,
        "size": generation.size,
        "records": sorted(generation.ranks),
        "kind": verdict.kind,
        "ranks": verdict.ranks,
        "collective": verdict.collective,
        "sentence": verdict.sentence,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run as a program; see --help.

    Returns:
        The exit status: 0, or 2 where nothing could be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchft_ext.analyze",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, help="with the records of all ranks, or below it")
    parser.add_argument("--json", action="store_true", help="one JSON list, for programs")
    chosen = parser.parse_args(arguments)
    try:
        reports = [_report(one) for one in read_folder(chosen.directory)]
    except (OSError, ValueError) as error:
        print(f"torchft_ext.analyze: {error}", file=sys.stderr)
        return 2
    if not reports:
        print(
            f"torchft_ext.analyze: {chosen.directory}: no record found; processes write one for "
            "each generation that fails where TORCH_FR_DUMP_TEMP_FILE is set",
            file=sys.stderr,
        )
        return 2
    if chosen.json:
        print(json.dumps(reports, indent=2))
        return 0
    for one in reports:
        print(
            f"group '{one['group']}', generation {one['generation']} of {one['size']} ranks "
            f"({one['id']}): {one['sentence']}."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
