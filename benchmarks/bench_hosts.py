"""A second host for one process, on this machine: a network namespace, a veth pair, a host name.

Needs root and iproute2. The namespace is made anew and removed with the context.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

NAME = "ftbench"
NEAR, FAR = f"{NAME}0", f"{NAME}1"  # the ends of the veth pair: here, and in the namespace
NEAR_ADDRESS, FAR_ADDRESS = "10.213.77.1", "10.213.77.2"


class NoSecondHost(RuntimeError):
    """This machine, or this user, cannot make one; the message says why."""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise NoSecondHost(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")


def _remove() -> None:
    for words in (["netns", "del", NAME], ["link", "del", NEAR]):
        subprocess.run(["ip", *words], capture_output=True)


class SecondHost:
    """A context manager. Attributes: address, near: of this side, as both sides reach it."""

    address = NEAR_ADDRESS
    near = NEAR
    far = FAR

    def __enter__(self) -> SecondHost:
        """Make it.

        Raises:
            NoSecondHost: no `ip`, no root, or no network namespaces.
        """
        if shutil.which("ip") is None:
            raise NoSecondHost("`ip` is missing: install iproute2")
        if os.geteuid() != 0:
            raise NoSecondHost("network namespaces need root")
        _remove()  # what a killed run has left
        try:
            _ip("netns", "add", NAME)
            _ip("link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", NAME)
            _ip("addr", "add", f"{NEAR_ADDRESS}/24", "dev", NEAR)
            _ip("link", "set", NEAR, "up")
            _ip("-n", NAME, "addr", "add", f"{FAR_ADDRESS}/24", "dev", FAR)
            _ip("-n", NAME, "link", "set", FAR, "up")
            _ip("-n", NAME, "link", "set", "lo", "up")
        except NoSecondHost:
            _remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _remove()

    @staticmethod
    def command(words: list[str]) -> list[str]:
        """Run these words there, as the same process (its id is that of the command)."""
        script = f'hostname {NAME} && exec "$@"'
        inside = ["unshare", "--uts", "sh", "-c", script, "sh", *words]
        return ["ip", "netns", "exec", NAME, *inside]
