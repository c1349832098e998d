"""Two libraries in turns: whose turn it is, and what the ratio of their times is, pair by pair.

One turn of ours and one of the rival's make a pair, so that what the machine does meanwhile touches
both alike. A turn is a list of times.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import bench_report as report

Turn = list[float]
Result = TypeVar("Result")


def take_turns(
    names: Sequence[str], pairs: int, seed: int, turn: Callable[[str], Result]
) -> dict[str, list[Result]]:
    """In a rank: each name's turns. The order is random, and the same on every rank."""
    chance = random.Random(seed)
    turns: dict[str, list[Result]] = {name: [] for name in names}
    for _ in range(pairs):
        order = list(names)
        chance.shuffle(order)
        for name in order:
            turns[name].append(turn(name))
    return turns


def slowest_rank(by_rank: Sequence[Sequence[Turn]]) -> list[Turn]:
    """By turn and operation, the longest time of any rank."""
    return [
        [max(times) for times in zip(*same_turn, strict=True)]
        for same_turn in zip(*by_rank, strict=True)
    ]


def compare(ours: Sequence[Turn], rivals: Sequence[Turn], seed: int) -> dict[str, Any]:
    """The median over all pairs of ours/rival, its 95 % interval, and how wide that is."""
    ratios = [
        statistics.median(mine) / statistics.median(theirs)
        for mine, theirs in zip(ours, rivals, strict=True)
    ]
    low, high = report.bootstrap_median(ratios, seed)
    median = statistics.median(ratios)
    return {
        "median": median,
        "interval95": [low, high],
        "relative_width": (high - low) / median,
    }


def repeat_until_narrow(
    round_of: Callable[[int], tuple[dict[str, Any], int, float]],
    arguments: argparse.Namespace,
    limit_s: float = float("inf"),
) -> dict[str, Any]:
    """Take rounds until the interval is narrow (--width), --most pairs are taken, or time is up.

    round_of: takes a round, given how many pairs there are; returns the result over all pairs so
    far, their number, and the relative width of the widest interval.
    """
    pairs, begun = 0, time.monotonic()
    while True:
        result, pairs, width = round_of(pairs)
        late = time.monotonic() - begun > limit_s
        if width <= arguments.width or pairs >= arguments.most or late:
            return result


def add_arguments(parser: argparse.ArgumentParser, pairs: int, most: int) -> None:
    parser.add_argument("--pairs", type=int, help=f"pairs of turns per round; default {pairs}")
    parser.add_argument("--most", type=int, help=f"pairs per size at most; default {most}")
    parser.add_argument(
        "--width", type=float, default=0.10, help="of the interval, relative; default 0.10"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the order of turns and of the resampling"
    )


def fill_in(arguments: argparse.Namespace, pairs: int, most: int) -> None:
    """The defaults that depend on --quick."""
    arguments.pairs = arguments.pairs or (5 if arguments.quick else pairs)
    arguments.most = arguments.most or (5 if arguments.quick else most)


def cells_of(ratio: dict[str, Any]) -> list[str]:
    """A ratio for a table: median, interval, width."""
    low, high = ratio["interval95"]
    width = f"{ratio['relative_width'] * 100:.0f} %"
    return [f"{ratio['median']:.2f}", f"{low:.2f} to {high:.2f}", width]
