"""Clients of stores by address."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

_HOW = "expected 'host:port/prefix' or '[address]:port/prefix', found "


def create_store_client(
    store_addr: str, timeout: float | timedelta = timedelta(seconds=60)
) -> Store:
    """Connect to the TCPStore at an address; the keys lie under the address's prefix.

    Blocks, without the GIL, until it is connected, up to `timeout`.

    Args:
        store_addr: "host:port/prefix"; an IPv6 address in brackets; without prefix: no prefix.
        timeout: of connecting and of the client's calls; seconds, or a timedelta.

    Raises:
        ValueError: no such address.
        torch.distributed.DistNetworkError: nobody answers there.
    """
    place, _, prefix = store_addr.partition("/")
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"create_store_client: store_addr: {_HOW}'{store_addr}'")
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    client = dist.TCPStore(
        host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=limit
    )
    return dist.PrefixStore(prefix, client) if prefix else client
