"""Where metrics are served: what TORCHFT_EXT_METRICS says."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["VARIABLE", "Address", "asked", "listen"]

VARIABLE = "TORCHFT_EXT_METRICS"
_LOOPBACK = "127.0.0.1"
_LARGEST_PORT = 65535
_MOST_TRIED = 64  # ports, one after the other
_BACKLOG = 16


@dataclass(frozen=True)
class Address:
    """Where to listen.

    Attributes:
        host: an address of this host, or a name of one.
        port: 0: any that is free.
        exact: that port and no other one.
    """

    host: str
    port: int
    exact: bool


def asked(environment: Mapping[str, str]) -> Address | None:
    """Return what the environment asks for; None: no metrics are served.

    Where LOCAL_RANK is set, as torchrun sets it, each process of the host has a port that is known
    before: that many after the given one.

    Raises:
        ValueError: the variable, or LOCAL_RANK, makes no sense.
    """
    text = environment.get(VARIABLE, "")
    if not text:
        return None
    host, port = _host_and_port(text)
    local_rank = environment.get("LOCAL_RANK", "")
    if port == 0 or not local_rank:
        return Address(host, port, exact=False)
    if not local_rank.isdecimal() or port + int(local_rank) > _LARGEST_PORT:
        raise ValueError(
            f"{VARIABLE}={text} with LOCAL_RANK={local_rank}: expected their sum to be a port"
        )
    return Address(host, port + int(local_rank), exact=True)


def _host_and_port(text: str) -> tuple[str, int]:
    """Take "host:port", "[v6]:port" or "port" apart; without a host it is the loopback."""
    host, colon, port = text.rpartition(":")
    if colon and not host:
        raise _bad(text)
    if not port.isdecimal() or int(port) > _LARGEST_PORT:
        raise _bad(text)
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise _bad(text)
    return host.strip("[]") if colon else _LOOPBACK, int(port)


def _bad(text: str) -> ValueError:
    return ValueError(
        f"{VARIABLE}: expected HOST:PORT, such as 127.0.0.1:9400, or PORT, found {text!r}"
    )


def listen(address: Address) -> socket.socket:
    """Return a socket that listens there, or at the next free port where that is allowed.

    Raises:
        OSError: no port can be had.
    """
    last = address.port if address.exact or address.port == 0 else address.port + _MOST_TRIED - 1
    trouble: OSError | None = None
    for port in range(address.port, min(last, _LARGEST_PORT) + 1):
        try:
            return _listen(address.host, port)
        except OSError as error:
            trouble = error
    assert trouble is not None
    raise trouble


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
