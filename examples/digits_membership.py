"""Who belongs to the group: decided by the launcher, read by the workers, over a store.

torchft_ext reports that the membership is broken, and begins an epoch with the membership it is
given; who that is, the user's own launcher decides. This is the simplest such launcher: it holds
the store, sees its children end, and writes each new membership under the next number.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Membership:
    number: int
    workers: list[int]  # a worker keeps its number for life; its place in this list is its rank

    @property
    def prefix(self) -> str:
        """Where in the store this epoch's ranks find each other."""
        return f"epoch/{self.number}"

    @property
    def world(self) -> int:
        return len(self.workers)

    def rank_of(self, worker: int) -> int:
        if worker not in self.workers:
            raise RuntimeError(f"worker {worker} is not in membership {self.number}: {self}")
        return self.workers.index(worker)

    def without(self, worker: int) -> Membership:
        return Membership(self.number + 1, [w for w in self.workers if w != worker])


def _key(number: int) -> str:
    return f"membership/{number}"


def publish(store: dist.Store, membership: Membership) -> None:
    store.set(_key(membership.number), json.dumps(membership.workers))


def await_newer(store: dist.Store, than: Membership, limit_s: float) -> Membership:
    """The newest membership after `than`, as soon as there is one.

    Raises TimeoutError when there is none within the limit: the launcher saw no worker end.
    """
    deadline = time.monotonic() + limit_s
    number = than.number
    while True:
        while store.check([_key(number + 1)]):
            number += 1
        if number > than.number:
            return Membership(number, json.loads(store.get(_key(number))))
        if time.monotonic() > deadline:
            raise TimeoutError(f"no membership after {than.number} within {limit_s:g} s")
        time.sleep(0.001)
