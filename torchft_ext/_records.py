"""The files of failed generations, as `torchft_ext.analyze` reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

_FORMAT = 1
_MOST_BYTES = 256 << 20  # of a file; a record of 100,000 operations has some 70 MB


@dataclass(frozen=True)
class Collective:
    """One collective that a rank has issued.

    Attributes:
        number: among the generation's collectives, from 1; the same on all ranks.
        name: as errors have it: "allreduce".
        dtype: of its tensors.
        root: the rank; 0 where there is none.
        items: in the outputs of all tensors together.
        state: "scheduled", "started", "completed" or "failed".
        issued_ns: when, in nanoseconds since 1970, by the clock of its host.
    """

    number: int
    name: str
    dtype: str
    root: int
    items: int
    state: str
    issued_ns: int

    @property
    def signature(self) -> tuple[object, ...]:
        """What all ranks give alike."""
        counted = self.items if self.name in ("allreduce", "broadcast") else None
        return self.name, self.dtype, self.root, counted

    def __str__(self) -> str:
        return f"{self.name} (collective {self.number})"


@dataclass(frozen=True)
class Failure:
    """Why a generation failed, as one rank has learned.

    Attributes:
        kind: "peer_lost", "timeout" ...
        rank: that caused it; -1: not known.
        how: one clause about that rank.
        time_ns: when, in nanoseconds since 1970, by the clock of its host.
    """

    kind: str
    rank: int
    how: str
    time_ns: int


@dataclass(frozen=True)
class RankRecord:
    """What one rank of a generation has written."""

    rank: int
    failure: Failure | None
    collectives: dict[int, Collective]

    @property
    def last(self) -> Collective | None:
        """The last collective that it has issued."""
        return self.collectives[max(self.collectives)] if self.collectives else None


@dataclass
class Generation:
    """One generation of one group, put together from its ranks' files.

    Attributes:
        group: the group's name.
        number: of the generation, as the rank counts that was read first.
        id: the same on all ranks, and in no other generation.
        size: its ranks.
        members: "host h, pid p" of each rank.
        ranks: those that have written.
    """

    group: str
    number: int
    id: str
    size: int
    members: list[str]
    ranks: dict[int, RankRecord] = field(default_factory=dict)

    @property
    def failures(self) -> list[Failure]:
        """Of all ranks that know of one, the earliest first."""
        known = [one.failure for one in self.ranks.values() if one.failure]
        return sorted(known, key=lambda failure: failure.time_ns)


def read_folder(folder: Path) -> list[Generation]:
    """Return the generations of all JSON files in a folder and below, in the order of failures.

    Files of other programs are passed over.

    Raises:
        NotADirectoryError: `folder` is no directory that exists.
        ValueError: a file says that a torchft_ext wrote it, and it is damaged or too new.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder}: expected a directory of records")
    found: dict[tuple[str, str], Generation] = {}
    for path in sorted(folder.rglob("*.json")):
        document = _own_document(path)
        if document is None:
            continue
        try:
            _enter(found, document)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"{path}: a damaged record: {error!r}") from error
    return sorted(found.values(), key=_when)


def _own_document(path: Path) -> dict[str, Any] | None:
    if os.path.getsize(path) > _MOST_BYTES:
        return None
    try:
        document = json.loads(path.read_text())
    except ValueError:
        return None
    if not isinstance(document, dict) or not isinstance(document.get("torchft_ext"), dict):
        return None
    version = document["torchft_ext"].get("format")
    if version != _FORMAT:
        raise ValueError(f"{path}: expected a record of format {_FORMAT}, found {version}")
    return document


def _enter(found: dict[tuple[str, str], Generation], document: dict[str, Any]) -> None:
    for one in document["torchft_ext"]["generations"]:
        key = (one["group"], one["id"])
        if key not in found:
            members = [f"host {each['host']}, pid {each['pid']}" for each in one["members"]]
            found[key] = Generation(
                one["group"], one["generation"], one["id"], one["size"], members
            )
        mine = (each for each in document["entries"] if each["process_group"][0] == one["name"])
        collectives = {each.number: each for each in _collectives(mine)}
        record = RankRecord(one["rank"], _failure(one["failure"]), collectives)
        found[key].ranks[record.rank] = record


def _collectives(entries: Iterator[dict[str, Any]]) -> Iterator[Collective]:
    for entry in entries:
        if entry["collective_seq_id"] == 0:
            continue
        yield Collective(
            entry["collective_seq_id"],
            entry["operation"],
            entry["output_dtypes"][0],
            entry["root"],
            sum(prod(sizes) for sizes in entry["output_sizes"]),
            entry["state"],
            entry["time_created_ns"],
        )


def _failure(value: dict[str, Any] | None) -> Failure | None:
    if value is None:
        return None
    return Failure(value["kind"], value["rank"], value["how"], value["time_ns"])


def _when(generation: Generation) -> tuple[int, str, int]:
    failures = generation.failures
    return failures[0].time_ns if failures else 1 << 62, generation.group, generation.number
