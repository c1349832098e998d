"""Reads Prometheus' text format 0.0.4, and refuses what is not of it."""

from __future__ import annotations

import re

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
_HELP = re.compile(rf"# HELP ({_NAME}) (.+)")
_TYPE = re.compile(rf"# TYPE ({_NAME}) (counter|gauge)")
_SAMPLE = re.compile(rf"({_NAME})(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (\S+)")
_PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


def parse(text: str) -> Samples:
    """Values by name and labels.

    Raises:
        AssertionError: a line is not of the format, a family comes twice or has no help or type, or
            a series comes twice.
    """
    assert text.endswith("\n")
    found: Samples = {}
    helped = typed = ""
    for line in text.removesuffix("\n").split("\n"):
        if match := _HELP.fullmatch(line):
            helped = match[1]
            assert helped not in found, f"twice: {line}"
        elif match := _TYPE.fullmatch(line):
            typed = match[1]
            assert typed == helped, f"type without help: {line}"
            assert (match[2] == "counter") == typed.endswith("_total"), line
            found[typed] = {}
        else:
            _add(found, typed, line)
    return found


def _add(found: Samples, family: str, line: str) -> None:
    match = _SAMPLE.fullmatch(line)
    assert match, f"not of the format: {line!r}"
    assert match[1] == family, f"in the family {family}: {line}"
    labels = frozenset(_PAIR.findall(match[2] or ""))
    assert labels not in found[family], f"twice: {line}"
    found[family][labels] = float(match[3])


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of a family's series that have these labels."""
    wanted = set(labels.items())
    return sum(value for of, value in samples[f"torchft_ext_{name}"].items() if wanted <= of)
