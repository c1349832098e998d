"""A host of its own for each process of the soak: network namespaces on one bridge.

Needs root and iproute2. All of it lies in a network and a mount namespace that enter() makes, and
ends with the last process in there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

INSIDE = "SOAK_INSIDE"  # of the environment
BRIDGE = "br0"
NOBODY = "02:00:00:00:00:01"
# Else it takes the least of its ports' addresses, another one when hosts come and go; and who has
# cached the old one does not reach the store for up to half a minute.
BRIDGE_HARDWARE = "02:00:00:00:00:02"
STORE_ADDRESS = "10.214.255.254"  # of the bridge


def enter() -> None:
    """Begin this program again in namespaces of its own; return at once where it is there."""
    if os.environ.get(INSIDE):
        return
    enter = ["unshare", "--net", "--mount", "--propagation", "private", "--"]
    os.environ[INSIDE] = "1"
    os.execvp(enter[0], [*enter, sys.executable, *sys.argv])


def _ip(*words: str, tool: str = "ip") -> None:
    subprocess.run([tool, *words], check=True, capture_output=True)


def _address(number: int) -> str:
    return f"10.214.{number // 250}.{number % 250 + 1}"


class Network:
    """The hosts, by number. Threads: one at a time. Calls of the kernel alone: nothing blocks."""

    def __init__(self) -> None:
        """Make the bridge, at which the store's process is.

        Raises:
            CalledProcessError, OSError: no root, or no iproute2.
        """
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        _ip("link", "set", "lo", "up")
        _ip("link", "add", BRIDGE, "address", BRIDGE_HARDWARE, "type", "bridge")
        _ip("link", "set", BRIDGE, "up")
        _ip("addr", "add", f"{STORE_ADDRESS}/16", "dev", BRIDGE)

    def command(self, number: int) -> list[str]:
        """Make a host; return what stands before the command of its process."""
        name, near = f"soak{number}", f"v{number}"
        _ip("netns", "add", name)
        _ip("link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", near, "master", BRIDGE, "up")
        _ip("-n", name, "addr", "add", f"{_address(number)}/16", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", name, "link", "set", device, "up")
        return ["ip", "netns", "exec", name]

    def remove(self, number: int) -> None:
        """Remove the host of a process that has ended."""
        _ip("netns", "del", f"soak{number}")

    def cut_off(self, number: int, *, cut: bool = True) -> None:
        """Cut a host off from all others and from the store, or undo that."""
        _ip("link", "set", f"v{number}", "down" if cut else "up")

    def cut_pair(self, numbers: tuple[int, int], *, cut: bool = True) -> None:
        """Cut two hosts off from each other, or undo that; one pair at a time."""
        for number in numbers:
            words = ("link", "set", "dev", f"v{number}", "isolated", "on" if cut else "off")
            _ip(*words, tool="bridge")

    def cut_between(self, ones: list[int], others: list[int], *, cut: bool = True) -> None:
        """Cut each of these hosts off from each of the others, or undo that; all reach the store.

        What one sends to the other goes to a hardware address that nobody has.
        """
        for here, there in [*product(ones, others), *product(others, ones)]:
            self.cut_way(here, there, cut=cut)

    def cut_way(self, here: int, there: int, *, cut: bool = True) -> None:
        """Let nothing through from one host to the other, or undo that."""
        words = ("replace", "lladdr", NOBODY, "nud", "permanent") if cut else ("del",)
        _ip("-n", f"soak{here}", "neigh", words[0], _address(there), *words[1:], "dev", "eth0")

    def refuse(self, here: int, there: int, *, refused: bool = True) -> None:
        """Let one host refuse connections to the other at once, as firewalls do, or undo that."""
        words = ("add" if refused else "del", "prohibit", f"{_address(there)}/32")
        _ip("-n", f"soak{here}", "route", *words)

    def shrink(self, number: int, mtu: int) -> None:
        """Let packets to a host through up to this size alone; nobody is told of larger ones."""
        _ip("link", "set", f"v{number}", "mtu", str(mtu))

    def send_single_packets(self, number: int) -> None:
        """Have its kernel cut what it sends: a bridge lets larger ones through that others cut."""
        _ip("-n", f"soak{number}", "link", "set", "eth0", "gso_max_segs", "1")
