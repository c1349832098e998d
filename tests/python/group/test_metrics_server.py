"""Metrics over HTTP: where they are served, and what clients cannot do."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from exposition import parse
from ports import free_ports
from rankside import wait_until

from torchft_ext import _metrics_client, _metrics_server
from torchft_ext._metrics_address import Address, asked, listen
from torchft_ext._metrics_server import MetricsServer

LIMIT = 60  # seconds
TEXT = "# HELP torchft_ext_x Of the test.\n# TYPE torchft_ext_x gauge\ntorchft_ext_x 1\n"
ANYWHERE = Address("127.0.0.1", 0, exact=False)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer(listen(ANYWHERE), lambda: TEXT)
    yield made
    made.close()


def scrape(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=LIMIT) as answer:
        return answer.read().decode()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT)


def all_of(client: socket.socket) -> bytes:
    found = b""
    while part := client.recv(4096):
        found += part
    return found


def answer_to(port: int, request: bytes) -> bytes:
    with connect(port) as client:
        client.sendall(request)
        return all_of(client)


def test_scrape_gets_the_text(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=LIMIT) as got:
        assert got.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert got.read().decode() == TEXT


def test_only_get_of_the_one_path_is_answered(server):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scrape(server.port, "/")
    assert b" 405 " in answer_to(server.port, b"POST /metrics HTTP/1.1\r\n\r\n").split(b"\r\n")[0]
    assert b" 400 " in answer_to(server.port, b"nonsense\r\n\r\n").split(b"\r\n")[0]


def test_huge_request_is_cut_short(server):
    longest = _metrics_client._LONGEST_REQUEST
    with connect(server.port) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"a" * longest)
        assert client.recv(4096).startswith(b"HTTP/1.1 431 ")
    assert scrape(server.port) == TEXT


def test_slow_clients_hold_up_nobody(server):
    slow = [connect(server.port) for _ in range(2 * _metrics_server._MOST_CLIENTS)]
    for client in slow:
        client.sendall(b"GET /met")
    assert scrape(server.port) == TEXT
    first = slow[0].recv(1)  # its place was taken
    assert first == b"", first
    for client in slow:
        client.close()


def test_slow_client_is_cut_off_by_its_deadline(server, monkeypatch):
    monkeypatch.setattr(_metrics_server, "_WITHIN_S", 0.05)
    with connect(server.port) as client:
        client.sendall(b"GET /met")
        assert client.recv(1) == b""


def test_client_that_does_not_read_is_cut_off_by_its_deadline(monkeypatch):
    monkeypatch.setattr(_metrics_server, "_WITHIN_S", 0.2)
    server = MetricsServer(listen(ANYWHERE), lambda: "x" * (64 << 20))
    try:
        with connect(server.port) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            wait_until(lambda: not server._clients, "the client's end")
    finally:
        server.close()


def test_closed_server_has_no_port_and_no_thread(server):
    server.close()
    assert not server._thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        connect(server.port)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"TORCHFT_EXT_METRICS": ""}, None),
        ({"TORCHFT_EXT_METRICS": "9400"}, Address("127.0.0.1", 9400, exact=False)),
        ({"TORCHFT_EXT_METRICS": "0.0.0.0:9400"}, Address("0.0.0.0", 9400, exact=False)),
        ({"TORCHFT_EXT_METRICS": "[::1]:9400"}, Address("::1", 9400, exact=False)),
        (
            {"TORCHFT_EXT_METRICS": "127.0.0.1:9400", "LOCAL_RANK": "3"},
            Address("127.0.0.1", 9403, exact=True),
        ),
        (
            {"TORCHFT_EXT_METRICS": "127.0.0.1:0", "LOCAL_RANK": "3"},
            Address("127.0.0.1", 0, exact=False),
        ),
    ],
)
def test_address_follows_from_the_environment(variables, expected):
    assert asked(variables) == expected


@pytest.mark.parametrize("text", ["nowhere", ":9400", "127.0.0.1:", "127.0.0.1:70000", "::1:9400"])
def test_address_that_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError, match="TORCHFT_EXT_METRICS"):
        asked({"TORCHFT_EXT_METRICS": text})


def test_next_free_port_is_taken_where_none_is_exact():
    (port,) = free_ports(1)
    with listen(Address("127.0.0.1", port, exact=True)):
        with pytest.raises(OSError, match="in use"):
            listen(Address("127.0.0.1", port, exact=True))
        with listen(Address("127.0.0.1", port, exact=False)) as other:
            assert other.getsockname()[0] == "127.0.0.1"
            assert port < other.getsockname()[1] < port + 64


PROGRAM = """
import os, sys
import torch, torch.distributed as dist
store = dist.HashStore()
dist.init_process_group("ft", store=store, rank=0, world_size=1)
from torchft_ext import _metrics_server
print(_metrics_server.port(), flush=True)
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        sys.stdin.readline()
        os._exit(0)
    os._exit(0)
sys.stdin.readline()
dist.destroy_process_group()
"""


def start(rank_env: dict[str, str], *arguments: str, **variables: str) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**rank_env, "TORCH_CPP_LOG_LEVEL": "INFO", **variables},
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def end(process: subprocess.Popen) -> str:
    """Let it end; return its log."""
    _, log = process.communicate("\n", timeout=LIMIT)
    return log


def test_process_serves_its_groups_and_says_where(rank_env):
    process = start(rank_env, TORCHFT_EXT_METRICS="127.0.0.1:0")
    port = int(process.stdout.readline())
    found = parse(scrape(port))
    assert sum(found["torchft_ext_generations_total"].values()) == 1
    log = end(process)
    assert process.returncode == 0
    assert log.count(f"metrics: http://127.0.0.1:{port}/metrics") == 1, log


def test_port_that_cannot_be_had_is_one_warning(rank_env):
    (port,) = free_ports(1)
    with listen(Address("127.0.0.1", port, exact=True)):
        process = start(rank_env, TORCHFT_EXT_METRICS=f"127.0.0.1:{port - 1}", LOCAL_RANK="1")
        assert process.stdout.readline() == "None\n"
        log = end(process)
    assert process.returncode == 0
    assert log.count("no metrics are served") == 1, log


def test_nothing_listens_where_nobody_has_asked(rank_env):
    process = start(rank_env)
    assert process.stdout.readline() == "None\n"
    end(process)


def test_forked_child_does_not_hold_the_port(rank_env):
    process = start(rank_env, "fork", TORCHFT_EXT_METRICS="127.0.0.1:0")
    port = int(process.stdout.readline())
    process.wait(LIMIT)  # the child lives on
    with pytest.raises(ConnectionRefusedError):
        connect(port)
    process.stdin.close()
    process.stdout.close()
    process.stderr.close()
