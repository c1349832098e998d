"""Where the child processes of groups listen, and with which limits."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from process_group_side import (
    LIMIT,
    place,
)
from rankside import seconds

from torchft_ext import _C
from torchft_ext import process_group as pgs


def listens_on(pid: int) -> set[str]:
    """The IPv4 addresses that a process has listening sockets on."""
    places = (os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink())
    sockets = {place[8:-1] for place in places if place.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets]
    return {socket.inet_ntoa(bytes.fromhex(one)[::-1]) for one in listening}


@pytest.mark.parametrize("kind", ["Host", "Gloo"])
def test_child_listens_where_it_is_told(store, kind):
    """Not on an address of its own choice: of this host's many, no other rule gives this one."""
    made = getattr(pgs, f"ProcessGroupBaby{kind}")(timeout=LIMIT)
    made._place, made._network = place(store), _C.Options(interface="127.0.0.3")
    request = made._request(0, 1, seconds(LIMIT), 1)
    child = made._children.take()
    child.configure(request, store, seconds(LIMIT))
    assert listens_on(child.pid) == {"127.0.0.3"}
    child.kill()
    made.shutdown()


@pytest.mark.parametrize(
    ("options", "variable"),
    [
        (_C.Options(), "TORCHFT_EXT_SOCKET_IFNAME"),
        (_C.Options(), "GLOO_SOCKET_IFNAME"),
        (_C.Options(interface="=lo"), ""),
        (_C.Options(), ""),
    ],
)
def test_child_is_told_to_listen_where_its_group_does(monkeypatch, store, options, variable):
    if variable:
        monkeypatch.setenv(variable, "lo")
    made = pgs.ProcessGroupBabyHost(timeout=LIMIT, options=options)
    made.configure(place(store), 0, 1)
    assert made._request(0, 1, seconds(LIMIT), 1).address == "127.0.0.1"
    assert listens_on(made.child_pid()) == {"127.0.0.1"}
    made.shutdown()


def test_address_is_chosen_once_for_a_group_and_its_children(monkeypatch, store):
    monkeypatch.setenv("TORCHFT_EXT_SOCKET_IFNAME", "lo")
    choose = _C._network_options

    def choose_and_forget(*args):
        chosen = choose(*args)
        monkeypatch.setenv("TORCHFT_EXT_SOCKET_IFNAME", "no-such-interface")
        return chosen

    monkeypatch.setattr(_C, "_network_options", choose_and_forget)
    made = pgs.ProcessGroupBabyHost(timeout=LIMIT)
    made.configure(place(store), 0, 1)
    assert made._request(0, 1, seconds(LIMIT), 1).address == "127.0.0.1"
    made.shutdown()


def test_child_has_the_settings_of_its_groups_network(monkeypatch, store):
    monkeypatch.setenv("TORCHFT_EXT_HEARTBEAT", "0")
    monkeypatch.setenv("TORCHFT_EXT_LOCAL_SOCKETS", "0")
    made = pgs.ProcessGroupBabyHost(timeout=LIMIT, options=_C.Options(port_range="23000-23999"))
    made.configure(place(store), 0, 1)
    request = made._request(0, 1, seconds(LIMIT), 1)
    assert (request.heartbeat_ms, request.local_sockets) == (0, False)
    assert request.ports == "23000-23999"
    made.shutdown()
