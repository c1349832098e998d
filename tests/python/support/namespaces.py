"""Programs in a network and a mount namespace of their own: with other names, ports and hosts.

A program is a function of a module, MODULE.main(folder, ...): what it returns is printed as JSON.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 180  # seconds
NAME_SERVER = "127.0.0.9"  # an address of this host: whoever is bound to its port 53 is asked
_FILES = {
    "resolv.conf": f"nameserver {NAME_SERVER}\noptions timeout:1 attempts:1\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "hosts: files dns\n",
}
_ENTER = ("unshare", "--mount", "--net", "--")


def _allowed() -> bool:
    try:
        return subprocess.run([*_ENTER, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


def in_namespaces(module: str, folder: Path, *more: str) -> dict:
    """Called by tests: what the program returned, which was given the folder and the rest."""
    if not _allowed():
        pytest.skip("this user may make no namespaces")
    from conftest import rank_environment

    command = [*_ENTER, sys.executable, "-m", "namespaces", module, str(folder), *more]
    env = rank_environment()
    del env["RES_OPTIONS"]  # resolv.conf is the test's
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _bring_loopback_up() -> None:
    up = 0x1 | 0x40  # IFF_UP, IFF_RUNNING
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", up))  # SIOCSIFFLAGS


def _mount_files(folder: Path) -> None:
    for name, text in _FILES.items():
        (folder / name).write_text(text)
        place = os.path.realpath(f"/etc/{name}")
        subprocess.run(["mount", "--bind", str(folder / name), place], check=True)


if __name__ == "__main__":
    own_folder = Path(sys.argv[2])
    _mount_files(own_folder)
    _bring_loopback_up()
    print(json.dumps(importlib.import_module(sys.argv[1]).main(own_folder, *sys.argv[3:])))
