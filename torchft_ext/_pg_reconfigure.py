"""Handles by which the groups of torchft_ext.process_group meet without a common store.

torch 2.14's ``ProcessGroup.reconfigure()`` is given the members' handles in the order of their
ranks. A handle names its member and the address of a TCPStore that the member serves; all meet on
the first one's.
"""

from __future__ import annotations

import json
import secrets
import socket
from typing import Any, NamedTuple

import torch.distributed as dist

from torchft_ext._pg_store import split_address

_LONGEST = 4096  # bytes; of a handle


class Meeting(NamedTuple):
    """Where the members of a generation meet, and as what."""

    store_addr: str
    rank: int
    world_size: int


class Handles:
    """One group's handle, and its store, which it serves from the first handle() on.

    Owner: the group, with which the store ends. Threads: one call at a time.
    """

    def __init__(self) -> None:
        """Name the member; opens nothing."""
        self._id = secrets.token_hex(16)
        self._server: dist.TCPStore | None = None

    def handle(self) -> str:
        """Return this member's handle. The store listens on all interfaces, as torch's do."""
        host = socket.gethostname()
        if self._server is None:
            self._server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return json.dumps({"id": self._id, "store": f"{host}:{self._server.port}"})

    def meeting(self, opts: Any) -> Meeting:
        """Read what reconfigure() was given; torch's ReconfigureOptions.

        Raises:
            ValueError: handles without an order, of other groups, or without this member's.
        """
        handles = opts.handles
        if not isinstance(handles, list) or not handles:
            raise ValueError(
                f"reconfigure: handles: expected a list in the order of ranks, found {handles!r}"
            )
        members = [_read(handle) for handle in handles]
        _check_meeting_place(members[0]["store"], handles[0])
        names = [member["id"] for member in members]
        if names.count(self._id) != 1:
            raise ValueError(
                "reconfigure: handles: expected this group's own once, found it "
                f"{names.count(self._id)} times"
            )
        place = f"{members[0]['store']}/torchft_ext/{opts.uuid}"
        return Meeting(place, names.index(self._id), len(members))


def _read(handle: object) -> dict[str, str]:
    if not isinstance(handle, str) or len(handle) > _LONGEST:
        raise _unexpected(str(handle))
    try:
        member = json.loads(handle)
        return {"id": str(member["id"]), "store": str(member["store"])}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unexpected(handle) from error


def _check_meeting_place(store_addr: str, handle: str) -> None:
    """Of the first member alone: nobody connects to the others' stores."""
    try:
        split_address(store_addr)
    except ValueError as error:
        raise _unexpected(handle) from error


def _unexpected(handle: str) -> ValueError:
    expected = "reconfigure: handles: expected those of get_reconfigure_handle(), found "
    return ValueError(f"{expected}{handle[:100]!r}")
