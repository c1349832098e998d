"""Exceptions that end one member after the other in the same step."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from torchft_ext.elastic._errors import RepeatedError
from torchft_ext.elastic._view import View
from torchft_ext.elastic._wire import Wire
from torchft_ext.errors import CommError

__all__ = ["Raised", "Repeats"]

_REASON = re.compile(r"step (\d+): ([A-Za-z_]\w*): (.*)", re.DOTALL)
_LAYOUT = struct.Struct("<q64s240s8s8s")  # step, kind, text, two members
_NOBODY = bytes(8)


@dataclass(frozen=True)
class Raised:
    """An exception that left a step's block, and with it the member.

    Attributes:
        step: the number of the step.
        kind: the name of its class.
        text: what it said; a part of it where it was long.
    """

    step: int
    kind: str
    text: str

    def reason(self) -> str:
        """Return what the other members are told, in words."""
        return f"step {self.step}: {self.kind}: {self.text}"

    @classmethod
    def told_by(cls, reason: str) -> Raised | None:
        """Return what reason() was made of; None where it was something else."""
        found = _REASON.fullmatch(reason)
        return None if found is None else cls(int(found[1]), found[2], found[3])


class Repeats:
    """Remembers who ended by which exception, and tells when a second member has ended by the same.

    Such an exception follows the work and not the process: a full disk ends each member that
    becomes rank 0. Without this the job would go on until nobody is left.

    The loop owns it. Threads: one at a time.
    """

    def __init__(self) -> None:
        self._raised: Raised | None = None
        self._members: set[bytes] = set()  # hashes of the ids of those that raised it

    def note(self, error: CommError, view: View) -> None:
        """Remember what ended the generation of that view, if it was a member's exception."""
        raised = Raised.told_by(error.cause.how)
        rank = error.cause.rank
        if raised is None or rank is None or not 0 <= rank < view.size:
            return
        self._add(raised, [_hash_of(view.members[rank])])

    def compare(self, wire: Wire) -> None:
        """Tell all members of a view what each knows. Blocks, in a collective of all of them.

        Raises:
            RepeatedError: two members have ended by the same exception. On all.
            CommError: the view is over.
        """
        for data in wire.all_gather_bytes(self._pack()):
            raised, members = _unpack(data)
            if raised is not None:
                self._add(raised, members)
        if self._raised is not None and len(self._members) > 1:
            raise RepeatedError(
                f"{self._raised.reason()}; this has ended {len(self._members)} members, one after "
                "the other, so it would end the next one too: mend its cause, and found a new job "
                "from a checkpoint"
            )

    def _add(self, raised: Raised, members: Iterable[bytes]) -> None:
        """Of several the one of the latest step counts: an earlier one has been overcome."""
        known = self._raised
        if known is not None and _order(raised) < _order(known):
            return
        if known is None or _order(raised) > _order(known):
            self._members.clear()
            self._raised = raised
        self._members.update(members)

    def _pack(self) -> bytes:
        if self._raised is None:
            return _LAYOUT.pack(-1, b"", b"", _NOBODY, _NOBODY)
        first, second = (*sorted(self._members), _NOBODY)[:2]
        kind, text = self._raised.kind.encode()[:64], self._raised.text.encode()[:240]
        return _LAYOUT.pack(self._raised.step, kind, text, first, second)


def _unpack(data: bytes) -> tuple[Raised | None, list[bytes]]:
    step, kind, text, *members = _LAYOUT.unpack(data)
    if step < 0:
        return None, []
    raised = Raised(step, _text_of(kind), _text_of(text))
    return raised, [member for member in members if member != _NOBODY]


def _text_of(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


def _order(raised: Raised) -> tuple[int, str]:
    """Two are the same where this is equal: what they say may differ."""
    return raised.step, raised.kind[:64]


def _hash_of(member: str) -> bytes:
    return blake2b(member.encode(), digest_size=8).digest()
