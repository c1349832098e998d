"""Names the difference between members whose digests differ, by the notes of one more agreement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchft_ext.elastic._codec import decode, encode
from torchft_ext.elastic._errors import DivergenceError, ElasticError
from torchft_ext.elastic._evidence import Evidence, Rows
from torchft_ext.elastic._sampler import BatchSampler
from torchft_ext.elastic._view import Answer, View
from torchft_ext.errors import CommError

__all__ = ["divergence"]

_ALL_NOTES = 1 << 20  # bytes, of all members; see Job.agree()
_LONGEST_VALUE = 64
_HASH = 8
_NAMES = "the names of parameters and values"
_BYTES = 4  # of a row's, where there is little room
_ROW = 3 * _LONGEST_VALUE  # at most, without its name

# A row of a report: its name, and the value's text, or a hash.
Row = tuple[str, str | bytes]


class Voter(Protocol):
    """What divergence() asks of a job."""

    def agree(self, ok: bool, note: bytes = b"", timeout: timedelta | None = None) -> Answer: ...


def divergence(
    job: Voter,
    view: View,
    evidence: Evidence,
    objects: Mapping[str, object],
    timeout: timedelta | None,
) -> DivergenceError:
    """Find out what differs. Blocks, in one agreement: all members of the view call it after an
    answer that has `diverged`.

    Args:
        job: of which `view` is the view.
        view: that voted.
        evidence: what this member's digest was made of.
        objects: of the state, by name; for advice.
        timeout: of the agreement.

    Returns:
        The error that all of them raise.
    """
    note = _note(evidence, _ALL_NOTES // view.size)
    try:
        answer = job.agree(False, note, timeout)
    except (CommError, ElasticError) as error:
        return DivergenceError(f"members hold different state; it was not found out which: {error}")
    reports = [_Report.unpack(note, evidence) for note in answer.notes]
    return _error_of({rank: one for rank, one in enumerate(reports) if one is not None}, objects)


def _note(evidence: Evidence, most: int) -> bytes:
    """With names and texts where there is room; else hashes of rows, which all have in one order.

    The names alone decide which of the two, so that members that have the same do the same.
    """
    common, of_shard = list(_rows(evidence.common)), list(_rows(evidence.of_shard))
    if not common and not of_shard:
        return b""
    room = sum(len(name) + _ROW for name, _ in (*common, *of_shard))
    if room <= most:
        return encode([evidence.shard, common, of_shard], "report").data
    fold = -(-_BYTES * (len(common) + len(of_shard) + 2) // max(1, most - _ROW))
    parts = [_folded(rows, fold) for rows in (common, of_shard)]
    note = encode([evidence.shard, fold, *parts], "report").data
    return note if len(note) <= most else b""


def _folded(rows: Sequence[Row], fold: int) -> list[bytes]:
    """A digest of the names, and of each so many rows a few bytes of their hash."""
    names = blake2b("\0".join(name for name, _ in rows).encode(), digest_size=_HASH).digest()
    hashes = b"".join(
        blake2b(encode(rows[at : at + fold], "rows").data, digest_size=_BYTES).digest()
        for at in range(0, len(rows), fold)
    )
    return [names, hashes]


def _unfolded(rows: Sequence[Row], fold: int, names: bytes, hashes: bytes) -> list[Row]:
    """By the names that this member has, where the other one has the same."""
    if _folded(rows, fold)[0] != names:
        return [(_NAMES, names)]
    labels = []
    for at in range(0, len(rows), fold):
        first, last = rows[at][0], rows[min(at + fold, len(rows)) - 1][0]
        labels.append(first if first == last else f"something from {first} to {last}")
    return [(name, hashes[n * _BYTES : (n + 1) * _BYTES]) for n, name in enumerate(labels)]


def _rows(rows: Rows) -> Iterator[Row]:
    for path, data in rows.values.items():
        yield path, _text_of(path, data)
    yield from rows.tensors()


def _text_of(path: str, data: bytes) -> str | bytes:
    """What people read, of values that are short."""
    if not data or len(data) > _LONGEST_VALUE:
        return blake2b(data, digest_size=_HASH).digest()
    return repr(decode(data, path, lambda _, meta: meta))


class _Report:
    """What one member says that it holds."""

    def __init__(
        self, common: Sequence[Row], of_shard: Sequence[Row], shard: int, folded: bool
    ) -> None:
        self.folded = folded
        self.common = dict(common)
        self.of_shard = dict(of_shard)
        self.shard = shard

    @classmethod
    def unpack(cls, note: bytes, evidence: Evidence) -> _Report | None:
        """None: the member gave none, or one in another language.

        Args:
            note: of another member, or of this one.
            evidence: of this member.
        """
        try:
            shard, *rest = decode(note, "report", lambda _, meta: meta)
            if len(rest) == 2:
                return cls(rest[0], rest[1], shard, folded=False)
            fold, common, of_shard = rest
            return cls(
                _unfolded(list(_rows(evidence.common)), fold, *common),
                _unfolded(list(_rows(evidence.of_shard)), fold, *of_shard),
                shard,
                folded=True,
            )
        except (ValueError, TypeError):
            return None


def _error_of(reports: Mapping[int, _Report], objects: Mapping[str, object]) -> DivergenceError:
    kinds = {one.folded for one in reports.values()}
    if len(kinds) > 1:  # it depends on the names
        found = _first_difference(
            {rank: {_NAMES: "more" if one.folded else "fewer"} for rank, one in reports.items()}
        )
    else:
        found = _first_difference({rank: one.common for rank, one in reports.items()})
    for shard in sorted({one.shard for one in reports.values()}):
        if found is None:
            holders = {rank: one.of_shard for rank, one in reports.items() if one.shard == shard}
            found = _first_difference(holders)
    if found is None:
        return DivergenceError(
            f"members hold different state, but nothing that ranks {sorted(reports)} report "
            "differs; others report nothing, or left"
        )
    name, said = found
    most = max(said.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    odd = tuple(sorted(rank for ranks in said.values() if ranks is not most for rank in ranks))
    texts = "; ".join(f"{_shown(value)} on ranks {ranks}" for value, ranks in said.items())
    step = _step_of(reports, most[0])
    return DivergenceError(
        f"{step}{name} differs: {texts}. {_advice(name, objects)}", path=name, ranks=odd
    )


def _step_of(reports: Mapping[int, _Report], rank: int) -> str:
    step = reports[rank].common.get("step", "")
    return f"step {step}: " if isinstance(step, str) and step else ""


def _first_difference(
    rows: Mapping[int, Mapping[str, str | bytes]],
) -> tuple[str, dict[str | bytes, list[int]]] | None:
    """The first row that is not the same on all, and who says what there."""
    names = dict.fromkeys(name for one in rows.values() for name in one)
    for name in names:
        said: dict[str | bytes, list[int]] = {}
        for rank, one in rows.items():
            said.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(said) > 1:
            return name, said
    return None


def _shown(value: str | bytes) -> str:
    return value if isinstance(value, str) else f"hash {value.hex()}"


def _advice(name: str, objects: Mapping[str, object]) -> str:
    """What it usually is."""
    if "gradient of" in name:
        return (
            "Is the model wrapped in DDP, and does every member's backward() go through it? "
            "A program that combines gradients in commit(), or leaves some that it does not apply, "
            "names steps(check='state')"
        )
    if "values of" in name:
        return "An update was made outside of commit(), or without all members"
    if name in ("total", "passes"):
        return f"Give steps() the same {name} on all members"
    value = objects.get(name.split(".")[0])
    if isinstance(value, BatchSampler):
        return "Give BatchSampler the same data, batch_size and seed on all members"
    if isinstance(value, Optimizer):
        return "Is a scheduler missing in State(), or was a value changed outside of commit()?"
    if isinstance(value, LRScheduler):
        return "Was it stepped outside of commit(), or on some members alone?"
    return "All members have to hold it alike"
