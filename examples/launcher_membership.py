"""Who belongs to the group: decided by the launcher, read by the workers, over a store.

torchft_ext reports that the membership is broken, and begins a generation with the membership it is
given; who that is, the user's own launcher decides. This is the simplest such launcher: it holds
the store, sees its children end, and writes each new membership under the next number: the prefix
under which its ranks meet, and who has which rank.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Membership:
    number: int
    prefix: str  # where in the store this generation's ranks find each other
    ranks: dict[int, int]  # rank in the membership before -> rank in this one

    @staticmethod
    def first(world: int) -> Membership:
        return Membership(1, "generation/1", {rank: rank for rank in range(world)})

    @property
    def world(self) -> int:
        return len(self.ranks)

    def without(self, rank: int) -> Membership:
        """The next one: this rank is gone, those above it move down."""
        number = self.number + 1
        left = [old for old in range(self.world) if old != rank]
        return Membership(
            number, f"generation/{number}", {old: new for new, old in enumerate(left)}
        )


def _key(number: int) -> str:
    return f"membership/{number}"


def publish(store: dist.Store, membership: Membership) -> None:
    record = {"prefix": membership.prefix, "ranks": membership.ranks}
    store.set(_key(membership.number), json.dumps(record))


def _read(store: dist.Store, number: int) -> Membership:
    record = json.loads(store.get(_key(number)))
    ranks = {int(old): new for old, new in record["ranks"].items()}  # JSON has text for keys
    return Membership(number, record["prefix"], ranks)


def await_newer(
    store: dist.Store, than: Membership, rank: int, limit_s: float
) -> tuple[Membership, int]:
    """The newest membership after `than`, as soon as there is one, and what `rank` is in it.

    Raises TimeoutError when there is none within the limit: the launcher saw no worker end.
    """
    deadline = time.monotonic() + limit_s
    while not store.check([_key(than.number + 1)]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no membership after {than.number} within {limit_s:g} s")
        time.sleep(0.001)
    newest = than
    while store.check([_key(newest.number + 1)]):  # each one's ranks refer to the one before it
        newest = _read(store, newest.number + 1)
        if rank not in newest.ranks:
            raise RuntimeError(f"this worker, rank {rank} before, is not in {newest}")
        rank = newest.ranks[rank]
    return newest, rank
