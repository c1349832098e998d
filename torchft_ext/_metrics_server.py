"""Serves metrics() over HTTP in this process, where TORCHFT_EXT_METRICS asks for it."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
from collections.abc import Callable
from time import monotonic

from torchft_ext import _C
from torchft_ext._metrics import metrics
from torchft_ext._metrics_address import VARIABLE, asked, listen
from torchft_ext._metrics_client import Client

__all__ = ["MetricsServer", "serve_if_asked", "stop"]

_MOST_CLIENTS = 8  # another one takes the place of the oldest
_WITHIN_S = 5.0  # a client's request and its answer
_FRESH_S = 0.1  # a text is given to all who ask in this time
_END_WITHIN_S = 1.0
_SHORTAGE_S = 0.5  # without a descriptor for another client; less than what close() waits


class MetricsServer:
    """Answers GET /metrics on one thread of its own, "torchft_ext metrics".

    Owner: whoever makes it, who calls close(). Threads: any. A client costs the text's making at
    most; slow and hostile ones are bounded in number, bytes and time, and hold up nobody else. It
    holds no lock that an operation takes.
    """

    def __init__(self, listener: socket.socket, text: Callable[[], str] = metrics) -> None:
        """Serve at this socket, which is then the server's. It is non-blocking, and listens."""
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._text = text
        self._made: tuple[float, str] | None = None  # when, and what
        self._clients: list[Client] = []  # the oldest first
        self._ending = threading.Event()
        self._waking, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._waking, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="torchft_ext metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End its thread and all connections, within a second. It may be called again."""
        self._ending.set()
        self._waker.close()
        self._thread.join(_END_WITHIN_S)

    def forget(self) -> None:
        """Close what a forked child has of it: its thread is the parent's."""
        self._listener.close()
        self._selector.close()
        self._waker.close()
        self._waking.close()
        for client in self._clients:
            client.close()

    def _run(self) -> None:
        try:
            while self._serve_some():
                pass
        finally:
            self.forget()

    def _serve_some(self) -> bool:
        """Do what can be done now; False: close() was called."""
        for key, _ in self._selector.select(self._time_left()):
            if key.fileobj is self._waking:
                return False
            if key.fileobj is self._listener:
                self._admit()
            elif key.data in self._clients:  # else another one has taken its place
                self._advance(key.data)
        for late in [one for one in self._clients if one.until <= monotonic()]:
            self._drop(late)
        return True

    def _time_left(self) -> float | None:
        """Until the oldest client is cut off; None: there is none."""
        return max(self._clients[0].until - monotonic(), 0.0) if self._clients else None

    def _admit(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # it goes on waiting: look again later
                self._ending.wait(_SHORTAGE_S)
            return  # else it has gone
        connected.setblocking(False)
        if len(self._clients) >= _MOST_CLIENTS:
            self._drop(self._clients[0])
        client = Client(connected, monotonic() + _WITHIN_S)
        self._clients.append(client)
        self._selector.register(connected, selectors.EVENT_READ, client)

    def _advance(self, client: Client) -> None:
        was_answering = client.answering
        if not client.advance(self._recent_text):
            self._drop(client)
        elif client.answering and not was_answering:
            self._selector.modify(client.socket, selectors.EVENT_WRITE, client)

    def _drop(self, client: Client) -> None:
        self._clients.remove(client)
        self._selector.unregister(client.socket)
        client.close()

    def _recent_text(self) -> str:
        if self._made is None or monotonic() - self._made[0] > _FRESH_S:
            self._made = (monotonic(), self._text())
        return self._made[1]


_lock = threading.Lock()
_server: MetricsServer | None = None
_asked = False  # the environment has been looked at


def serve_if_asked() -> None:
    """Serve, if the environment says so; called whenever a group has been made.

    What cannot be served is one warning in the log. Does not block.
    """
    global _server, _asked
    with _lock:
        if _asked:
            return
        _asked = True
        try:
            address = asked(os.environ)
            if address is None:
                return
            _server = MetricsServer(listen(address))
        except (OSError, ValueError, RuntimeError) as error:
            _C._warn(f"{VARIABLE}={os.environ[VARIABLE]}: no metrics are served: {error}")
            return
        _C._info(f"metrics: http://{address.host}:{_server.port}/metrics")


def port() -> int | None:
    """Return the port at which metrics are served; None: they are not."""
    server = _server
    return None if server is None else server.port


def stop() -> None:
    """End the server; at the process's end."""
    global _server
    with _lock:
        server, _server = _server, None
    if server is not None:
        server.close()


def _in_forked_child() -> None:
    """The port is the parent's; a child that makes groups of its own serves at another one."""
    global _server, _asked, _lock
    _lock = threading.Lock()
    if _server is not None:
        _server.forget()
    _server, _asked = None, False


os.register_at_fork(after_in_child=_in_forked_child)
