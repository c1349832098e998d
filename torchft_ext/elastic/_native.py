"""What the native part returns, as its stub names it."""

from __future__ import annotations

from typing import TypedDict


class ViewFields(TypedDict):
    """Of a view; see View."""

    number: int
    lineage: bytes
    rank: int
    founder: bool
    size: int
    old_size: int
    members: tuple[str, ...]
    members_continuing: tuple[bool, ...]


class AnswerFields(TypedDict):
    """Of an answer; see Answer. Notes by member."""

    ok: bool
    notes: dict[str, bytes]
    waiting: list[str]
    leaving: list[str]
    new_witness: bool
    diverged: bool
    last: bool
