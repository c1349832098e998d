"""One connection of the metrics server, from its request to the end of the answer."""

from __future__ import annotations

import socket
from collections.abc import Callable

__all__ = ["Client"]

_LONGEST_REQUEST = 4096  # bytes, with its headers
_PATH = "/metrics"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Client:
    """What has come and what is to be sent. Owner: the server; its thread alone. Never blocks.

    Attributes:
        socket: non-blocking; closed by close().
        until: when it is cut off, by the monotonic clock.
        answering: its request is there; what remains is to be sent.
    """

    def __init__(self, connected: socket.socket, until: float) -> None:
        """The server makes it."""
        self.socket = connected
        self.until = until
        self.answering = False
        self._request = b""
        self._answer = memoryview(b"")

    def advance(self, text: Callable[[], str]) -> bool:
        """Read or write what the socket takes now; whether more is to be done."""
        try:
            return self._write() if self.answering else self._read(text)
        except BlockingIOError:
            return True
        except OSError:  # it has gone
            return False

    def close(self) -> None:
        """Close it; it may be called again."""
        self.socket.close()

    def _read(self, text: Callable[[], str]) -> bool:
        part = self.socket.recv(_LONGEST_REQUEST + 1 - len(self._request))
        self._request += part
        if b"\r\n\r\n" in self._request or b"\n\n" in self._request:
            return self._begin(_answer_to(self._request, text))
        if len(self._request) > _LONGEST_REQUEST:
            return self._begin(_response("431 Request Header Fields Too Large", "too long\n"))
        return bool(part)  # none: it has closed

    def _begin(self, answer: bytes) -> bool:
        self.answering = True
        self._answer = memoryview(answer)
        return self._write()

    def _write(self) -> bool:
        sent = self.socket.send(self._answer)
        self._answer = self._answer[sent:]
        return len(self._answer) > 0


def _answer_to(request: bytes, text: Callable[[], str]) -> bytes:
    words = request.split(b"\r\n", 1)[0].decode("latin-1").split()
    if len(words) != 3 or not words[2].startswith("HTTP/"):
        return _response("400 Bad Request", "expected an HTTP request\n")
    if words[0] != "GET":
        return _response("405 Method Not Allowed", "expected GET\n", "Allow: GET\r\n")
    if words[1].split("?", 1)[0] != _PATH:
        return _response("404 Not Found", f"expected {_PATH}\n")
    return _response("200 OK", text())


def _response(status: str, body: str, more: str = "") -> bytes:
    content = body.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {_TEXT}\r\nContent-Length: {len(content)}\r\n"
        f"{more}Connection: close\r\n\r\n"
    )
    return head.encode() + content
