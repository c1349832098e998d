"""An operator's word, through the job's store: one member goes on alone without a quorum.

One key for each view number, below the job's name: empty, then _ORDERED once the operator has
spoken, then the member that took the order. Each change is a compare_set, so one member takes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep

import torch.distributed as dist

from torchft_ext.elastic._errors import LeftOutError

__all__ = ["Operator", "Orders", "client_of", "job_of"]

_logger = logging.getLogger("torchft_ext")
_ORDERED = "ordered"
_WITHDRAWN = "withdrawn"
_LOOK_EVERY_S = 0.5


def job_of(address: str) -> tuple[str, int, str]:
    """Return host, port and the job's name of "host:port/name".

    Raises:
        ValueError: it is no such address.
    """
    place, _, name = address.partition("/")
    host, _, port = place.rpartition(":")
    if not (host and port.isdigit() and name):
        raise ValueError(f"address: expected 'host:port/name', found {address!r}")
    return host.strip("[]"), int(port), name


def client_of(address: str, timeout: timedelta) -> dist.Store:
    """Return a client of the job's store that sees the job's keys. Blocks until it is connected."""
    host, port, name = job_of(address)
    return dist.PrefixStore(name, dist.TCPStore(host, port, is_master=False, timeout=timeout))


class Orders:
    """The orders of one job. Threads: one at a time. Each call blocks while the store does."""

    def __init__(self, store: dist.Store) -> None:
        """Of a store that sees the job's keys."""
        self._store = store

    def give(self, view: int) -> str:
        """Order one member to go on alone from this view, also where an order was withdrawn. Return
        what stands there then.
        """
        found = self._swap(view, "", _ORDERED)
        return self._swap(view, _WITHDRAWN, _ORDERED) if found == _WITHDRAWN else found

    def taker(self, view: int, within: timedelta) -> str | None:
        """Wait for a member to take the order; None: nobody did, and it is withdrawn."""
        until = monotonic() + within.total_seconds()
        while (found := self._swap(view, _ORDERED, _ORDERED)) == _ORDERED:
            if monotonic() >= until:
                found = self._swap(view, _ORDERED, _WITHDRAWN)
                return None if found == _WITHDRAWN else found
            sleep(_LOOK_EVERY_S)
        return None if found == _WITHDRAWN else found

    def take(self, view: int, member: str) -> bool:
        """Return whether this member is to go on alone from this view.

        Raises:
            LeftOutError: another member does.
        """
        found = self._swap(view, _ORDERED, member) if self._exists(view) else ""
        if found in ("", _WITHDRAWN):
            return False
        if found != member:
            raise LeftOutError(
                f"an operator's word: member {found} goes on alone from view {view}: join again"
            )
        return True

    def _exists(self, view: int) -> bool:
        return self._store.check([_key(view)])

    def _swap(self, view: int, expected: str, desired: str) -> str:
        return self._store.compare_set(_key(view), expected, desired).decode()


class Operator:
    """Whom a member that has lost its quorum waits for. Owner: its Job, on a thread of which it
    works.
    """

    def __init__(
        self, address: str, member: str, timeout: timedelta, is_leaving: Callable[[], bool]
    ) -> None:
        """Of the job at this address. timeout: of a connection to the store."""
        self._address = address
        self._member = member
        self._timeout = timeout
        self._is_leaving = is_leaving
        self._told_of = 0  # the view of which the log has a line
        self._orders: Orders | None = None

    def has_spoken(self, error: Exception, view: int) -> bool:
        """Return whether this member is to go on alone from this view; a moment later if not.

        The store may be away meanwhile.

        Raises:
            LeftOutError: another member goes on alone, or this process has been told to leave.
        """
        if self._is_leaving():
            raise LeftOutError(
                f"this process was told to leave while it waited for an operator's word: {error}"
            ) from error
        if self._told_of != view:
            _logger.warning(
                "%s. This member keeps its state and waits for an operator's word: "
                "python -m torchft_ext.elastic overrule %s --view %d",
                error,
                self._address,
                view,
            )
        self._told_of = view
        if self._ordered(view):
            return True
        sleep(_LOOK_EVERY_S)
        return False

    def _ordered(self, view: int) -> bool:
        try:
            if self._orders is None:
                self._orders = Orders(client_of(self._address, self._timeout))
            return self._orders.take(view, self._member)
        except LeftOutError:
            raise
        except RuntimeError:  # of torch's client: the store does not answer
            self._orders = None
            return False


def _key(view: int) -> str:
    return f"overrule/{view}"
