"""Interfaces, ports and address families are as chosen."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from fresh_process import run_cases
from ports import free_ports
from ranks import values_of
from rankside import PATIENCE, backend, init_fresh, leave_default_group, seconds, wait_errored
from values import check_sum

from torchft_ext import elastic


def listening() -> set[tuple[str, int]]:
    """This process's listening TCP sockets, of every thread: local address in hex, and port."""
    own = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            for entry in (task / "fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    own.add(os.readlink(entry))
    found = set()
    for family in ("tcp", "tcp6"):
        path = Path("/proc/net") / family
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add((address, int(port, 16)))
    return found


def test_listeners_lie_in_the_chosen_port_range(ranks):
    first = random.randrange(20_000, 28_000)
    before = ranks.world(2).run(listening)
    world = ranks.world(2, port_range=f"{first}-{first + 300}")
    world.run(check_sum)
    for old, new in zip(before, world.run(listening), strict=True):
        opened = new - old
        assert opened and all(first <= port <= first + 300 for _, port in opened), opened


def opened_by_an_elastic_member(address: str, ports: str) -> set[tuple[str, int]]:
    leave_default_group()
    os.environ["TORCHFT_EXT_PORT_RANGE"] = ports
    before = listening()
    job = elastic.join(address, size=1, timeout=seconds(PATIENCE))
    try:
        job.recover()
        return listening() - before
    finally:
        del os.environ["TORCHFT_EXT_PORT_RANGE"]  # this process serves other tests too
        job.close()
        leave_default_group()


def test_listeners_of_an_elastic_member_lie_in_the_range_of_the_environment(ranks):
    first = random.randrange(20_000, 28_000)
    opened = ranks.fresh(1).on(
        0, opened_by_an_elastic_member, ranks.address(), f"{first}-{first + 300}"
    )
    assert len(opened) == 4 and all(first <= port <= first + 300 for _, port in opened), opened


@pytest.mark.parametrize(("interface", "address"), [("lo", "0100007F"), ("127.0.0.5", "0500007F")])
def test_listeners_are_bound_to_the_chosen_interface_alone(ranks, interface, address):
    before = ranks.world(2).run(listening)
    # A heartbeat of its own: groups with equal options share their listeners.
    world = ranks.world(2, interface=interface, heartbeat=seconds(31))
    world.run(check_sum)
    for old, new in zip(before, world.run(listening), strict=True):
        addresses = {bound_to for bound_to, _ in new - old}
        assert addresses == {address}, addresses


def test_listeners_are_bound_to_the_address_towards_the_store(ranks):
    before = ranks.world(2).run(listening)
    world = ranks.world(2, heartbeat=seconds(35))  # of its own, as above
    world.run(check_sum)
    for old, new in zip(before, world.run(listening), strict=True):
        addresses = {bound_to for bound_to, _ in new - old}
        assert addresses == {"0100007F"}, addresses  # the tests' store is at 127.0.0.1


def local_connections() -> int:
    """Connections between processes of this host that peers have made to this one."""
    return backend().stats()["counters"]["connections_local"]


def connections_without_local_sockets(address: str, rank: int, size: int, by: str) -> int:
    """Begin a generation and use it; how many of the connections to this process are local."""
    from rankside import join

    if by == "option":
        join(address, rank, size, local_sockets=False)
    else:
        os.environ["TORCHFT_EXT_LOCAL_SOCKETS"] = "0"
        try:
            join(address, rank, size, timeout=seconds(37))  # options that no other test has
        finally:
            del os.environ["TORCHFT_EXT_LOCAL_SOCKETS"]
    check_sum()
    return local_connections()


@pytest.mark.parametrize("by", ["option", "variable"])
def test_connections_within_a_host_are_local_unless_that_is_switched_off(ranks, by):
    world = ranks.world(2, local_sockets=True)
    world.run(check_sum)
    assert world.on(0, local_connections) > 0
    address = ranks.address()
    calls = [
        world.start(rank, connections_without_local_sockets, address, rank, 2, by)
        for rank in range(2)
    ]
    assert values_of(calls) == [0, 0]


def form_without_unix_sockets(init_method: str) -> int:
    """Begin a generation where a sandbox refuses to make Unix sockets; how many connections are
    local."""
    import ctypes
    import platform
    import struct

    number = {"x86_64": 41, "aarch64": 198}[platform.machine()]  # of socket()
    program = [
        (0x20, 0, 0, 0),  # load the number of the call
        (0x15, 0, 3, number),  # another one: allowed
        (0x20, 0, 0, 16),  # load its first argument
        (0x15, 0, 1, socket.AF_UNIX),  # another family: allowed
        (0x06, 0, 0, 0x0005_0000 | 97),  # EAFNOSUPPORT
        (0x06, 0, 0, 0x7FFF_0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in program))
    filters = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, ctypes.c_char_p(filters), 0, 0) == 0, ctypes.get_errno()
    with pytest.raises(OSError, match="family"):
        socket.socket(socket.AF_UNIX)
    dist.init_process_group("ft", init_method, rank=0, world_size=1, timeout=seconds(PATIENCE))
    check_sum()
    return local_connections()


def test_generations_form_where_unix_sockets_are_forbidden(tmp_path, rank_env):
    method = f"file://{tmp_path}/store"
    connections = run_cases("test_network", "form_without_unix_sockets", [method], rank_env)
    assert connections == {method: 0}


def environment_chooses(name: str, value: str, address: str) -> str:
    from rankside import join

    os.environ[name] = value
    try:
        join(address, 0, 1, timeout=seconds(30 + len(name) / 10))  # options that no other test has
        check_sum()
        return ""
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        del os.environ[name]


@pytest.mark.parametrize(
    ("variable", "good", "bad"),
    [
        ("TORCHFT_EXT_SOCKET_IFNAME", "lo", "nonexistent9"),
        ("GLOO_SOCKET_IFNAME", "lo", "nonexistent9"),
        ("TORCHFT_EXT_PORT_RANGE", "20000-29999", "no-ports"),
        ("TORCHFT_EXT_PORT_RANGE", "0", "20000-20001"),
        ("TORCHFT_EXT_LOCAL_SOCKETS", "1", "yes"),
    ],
)
def test_environment_variable_is_followed_and_a_bad_value_named(ranks, variable, good, bad):
    world = ranks.world(1)
    assert world.on(0, environment_chooses, variable, good, ranks.address()) == ""
    ranks.world(1)  # the default options again, so that the next group is made anew
    text = world.on(0, environment_chooses, variable, bad, ranks.address())
    assert variable in text and bad in text


def names_are_followed(address: str, names: dict[str, str]) -> str:
    """Make a group under these variables, and "option"; what that was refused with."""
    from rankside import join

    option = names.pop("option", None)
    chosen = {} if option is None else {"interface": option}
    os.environ.update(names)
    try:
        join(address, 0, 1, timeout=seconds(35 + len(names) / 10), **chosen)
        return ""
    except ValueError as error:
        return str(error)
    finally:
        for name in names:
            del os.environ[name]


OURS, GLOOS = "TORCHFT_EXT_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        ({"option": "lo", OURS: "none8", GLOOS: "none9"}, ""),
        ({"option": "none7", OURS: "lo", GLOOS: "lo"}, "none7"),
        ({OURS: "lo", GLOOS: "none9"}, ""),
        ({OURS: "none8", GLOOS: "lo"}, "none8"),
    ],
    ids=["good_option", "bad_option", "good_variable", "bad_variable"],
)
def test_option_goes_before_our_variable_and_that_before_gloos(ranks, names, refused):
    world = ranks.world(1)
    text = world.on(0, names_are_followed, ranks.address(), names)
    assert (refused in text) if refused else text == "", text


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


def init_over_ipv6(address: str, rank: int) -> list[str]:
    before = listening()
    init_fresh(address, rank, 2)
    check_sum()
    return [bound_to for bound_to, _ in listening() - before]


def configure_at(address: str, rank: int, size: int) -> None:
    backend().configure(address, rank, size, timeout=seconds(30))
    check_sum()


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this host has no ::1")
def test_generations_form_over_ipv6(ranks):
    server = dist.TCPStore("::1", 0, is_master=True, wait_for_workers=False)
    world = ranks.world(2)
    address = f"[::1]:{server.port}/first"
    calls = [world.start(rank, init_over_ipv6, address, rank) for rank in range(2)]
    for addresses in values_of(calls):
        assert set(addresses) == {"0" * 24 + "01000000"}, addresses  # ::1
    address = f"[::1]:{server.port}/second"
    values_of([world.start(rank, configure_at, address, rank, 2) for rank in range(2)])
    world.next().run(check_sum)


def test_store_may_be_named_by_a_host_name(ranks):
    world = ranks.world(2)
    address = ranks.address().replace("127.0.0.1", "localhost")
    values_of([world.start(rank, configure_at, address, rank, 2) for rank in range(2)])


NAMELESS = "no-such-host.invalid"
# Loaded before libc, so that no privilege is needed for another host name.
HOST_NAME = f"""
#include <cstddef>
#include <cstdio>
extern "C" int gethostname(char* name, size_t size) {{
  return std::snprintf(name, size, "{NAMELESS}") < 0 ? -1 : 0;
}}
"""


@pytest.fixture
def nameless_env(tmp_path: Path, rank_env: dict[str, str]) -> dict[str, str]:
    """The environment of processes whose host has a name that does not resolve."""
    source, library = tmp_path / "host_name.cpp", tmp_path / "host_name.so"
    source.write_text(HOST_NAME)
    compiler = os.environ.get("CXX") or "g++"
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=PATIENCE)
    return {**rank_env, "LD_PRELOAD": str(library)}


def two_on_a_nameless_host(init_method: str) -> str:
    """Form a world of two processes, of which one is killed; the host that the other blames."""
    assert socket.gethostname() == NAMELESS
    with pytest.raises(OSError):
        socket.getaddrinfo(NAMELESS, None)
    child = os.fork()  # before anything has started a thread
    rank = 1 if child == 0 else 0
    try:
        limit = seconds(PATIENCE)
        dist.init_process_group("ft", init_method, rank=rank, world_size=2, timeout=limit)
        check_sum()
        if rank == 1:
            time.sleep(PATIENCE)  # until it is killed
        os.kill(child, signal.SIGKILL)
        return wait_errored().cause["host"]
    finally:
        if rank == 1:
            os._exit(1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_generations_form_on_a_host_whose_name_does_not_resolve(tmp_path, nameless_env):
    methods = [f"file://{tmp_path}/store", f"tcp://127.0.0.1:{free_ports(1)[0]}"]
    hosts = run_cases("test_network", "two_on_a_nameless_host", methods, nameless_env)
    assert list(hosts.values()) == [NAMELESS, NAMELESS], hosts
