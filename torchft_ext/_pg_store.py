"""Clients of stores by address."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchft_ext._pg_arguments import limit_of
from torchft_ext.errors import CommTimeoutError

_HOW = "expected 'host:port/prefix' or '[address]:port/prefix', found "


def create_store_client(
    store_addr: str, timeout: float | timedelta = timedelta(seconds=60)
) -> Store:
    """Connect to the TCPStore at an address, and return a client that adds the address's prefix.

    Blocks, without the GIL, until it is connected, up to `timeout`.

    Args:
        store_addr: the address, "host:port/prefix", or "host:port" for no prefix. An IPv6 address
            may be written with or without brackets.
        timeout: the limit for connecting, and for the client's calls; seconds, or a timedelta.

    Raises:
        ValueError: no such address, or a timeout that is not positive.
        torch.distributed.DistNetworkError: nobody answers there.
    """
    host, port, prefix = split_address(store_addr)
    client = _connected(host, port, limit_of("create_store_client", timeout))
    return dist.PrefixStore(prefix, client) if prefix else client


def split_address(store_addr: str) -> tuple[str, int, str]:
    """Return host, port and prefix of an address; ValueError: it is none."""
    place, _, prefix = store_addr.partition("/")
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"create_store_client: store_addr: {_HOW}'{store_addr}'")
    return host.strip("[]"), int(port), prefix


def check_meeting_place(store_addr: str) -> None:
    """Refuse what Backend.configure() refuses, whose words these are.

    Raises:
        ValueError: no address, or none with a prefix, which each generation needs for itself.
    """
    place, slash, prefix = store_addr.partition("/")
    host, _, port = place.rpartition(":")
    if not host:
        problem = "no host"
    elif not port.isdigit() or not 0 < int(port) < 65536:
        problem = "the port is no number from 1 to 65535"
    elif not slash:
        problem = "no '/prefix' after the port"
    elif not prefix:
        problem = "the prefix is empty; each group and generation needs one of its own"
    else:
        return
    raise ValueError(
        "configure: store_addr: expected 'host:port/prefix' or '[ipv6]:port/prefix', found "
        f"'{store_addr}': {problem}"
    )


def _connected(host: str, port: int, timeout: timedelta) -> Store:
    return dist.TCPStore(
        host_name=host, port=port, is_master=False, wait_for_workers=False, timeout=timeout
    )


def _reached(host: str, port: int, timeout: timedelta) -> Store:
    began = time.monotonic()
    try:
        return _connected(host, port, timeout)
    except dist.DistNetworkError as error:
        elapsed = time.monotonic() - began
        why = str(error).splitlines()[0]
        raise CommTimeoutError(
            f"configure: no answer from the store at {host}:{port}, {elapsed:.3f} s into the "
            f"configure (timed out after a timeout of {timeout.total_seconds():g} s: {why}); check "
            "the address, and call configure() again",
            op="configure",
            elapsed=timedelta(seconds=elapsed),
            limit=timeout,
        ) from None


def store_for_configure(store_addr: str, timeout: timedelta) -> Store:
    """As create_store_client(), but for the error.

    Raises:
        CommTimeoutError: nobody answers there.
    """
    host, port, prefix = split_address(store_addr)
    client = _reached(host, port, timeout)
    return dist.PrefixStore(prefix, client) if prefix else client


class KeptClient:
    """The client of the last store, for all addresses there: connecting may wait for name servers.

    Owner: one group. Threads: one call at a time; forget(): any, at any time.
    """

    def __init__(self) -> None:
        self._place: tuple[str, int] | None = None
        self._client: Store | None = None
        self._keeps = True

    def forget(self) -> None:
        """Keep no client any more, whoever holds this."""
        self._keeps = False
        self._client = None

    def at(self, store_addr: str, timeout: timedelta) -> Store:
        """As store_for_configure(); connects where the last address was elsewhere."""
        host, port, prefix = split_address(store_addr)
        client = self._client
        if client is None or self._place != (host, port):
            client = _reached(host, port, timeout)
            self._client, self._place = client, (host, port)
            if not self._keeps:  # now: forget() may have come meanwhile
                self._client = None
        client.set_timeout(timeout)
        return dist.PrefixStore(prefix, client)
