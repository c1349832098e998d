"""Ports to listen at that nobody else takes meanwhile."""

from __future__ import annotations

import itertools
import os
import socket

# Below those that the system gives to who asks for any (from 32768 on); processes that run at the
# same time begin at different ones.
FIRST = 10000
OF_A_PROCESS = 16
PROCESSES = 1250

_next = itertools.count()


def free_ports(count: int) -> list[int]:
    """No two alike, nor alike those of the call before."""
    first = FIRST + os.getpid() % PROCESSES * OF_A_PROCESS
    ports: list[int] = []
    for _ in range(OF_A_PROCESS):
        port = first + next(_next) % OF_A_PROCESS
        if is_free(port):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"expected {count} free ports in {first} to {first + OF_A_PROCESS - 1}")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
