"""The protocol between a group and its child process: frames over one stream socket.

A frame is a header, `<IB`: the length of what follows it, at most MOST, and the kind. Numbers are
little-endian; a text is its length in 16 bits and UTF-8, bytes are their length in 32 bits and
themselves. Nothing is pickled, nothing refers to memory but by spans: offset and length in the
arena, or in memory of a device, that the parent lends, by its address there. csrc/child/protocol.h
is the same for children in C++.

    child                                   parent
    HELLO version                       ->
                                        <-  CONFIGURE rank, size, limits, names, the store's place
    STORE_SET | STORE_GET | STORE_REMOVE ->
                                        <-  STORE_REPLY to each, by its number
    CONFIGURED outcome, text            ->
                                        <-  MEMORY | FORGET | ORDER, of a device, before an ISSUE
                                        <-  ISSUE number, kind, items, root or peer, tag, spans
    DONE number, outcome, source, text  ->  one for each ISSUE, in any order
                                        <-  QUIT: say goodbye to the others, and exit

A child configures once. A frame that is none of these, or not in its place, ends the child; the
parent kills a child that sends one. Whoever sees the end of the stream knows that the other is
gone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

VERSION = 1
MOST = 16 << 20  # bytes of a frame after its header
HEADER = struct.Struct("<IB")
NUMBER = struct.Struct("<I")  # HELLO's version; of a request to the store; of keys, and of values
OUTCOME = struct.Struct("<B")
REPLY = struct.Struct("<IBI")  # number, outcome, count of values
_LENGTH = struct.Struct("<H")
_ISSUE = struct.Struct("<QBBB?iIQII")
_SPAN = struct.Struct("<QQ")
_CONFIGURE = struct.Struct("<iiQQBH")
_DONE = struct.Struct("<QBi")
_MEMORY = struct.Struct("<QQi")
_ADDRESS = struct.Struct("<Q")
_ORDER = struct.Struct("<Ii")


class Kind(IntEnum):
    CONFIGURE = 1
    ISSUE = 2
    STORE_REPLY = 3
    QUIT = 4
    MEMORY = 5
    FORGET = 6
    ORDER = 7
    HELLO = 129
    CONFIGURED = 130
    DONE = 131
    STORE_SET = 132
    STORE_GET = 133
    STORE_REMOVE = 134


_KINDS = frozenset(int(kind) for kind in Kind)


class Op(IntEnum):
    """What a child computes; buffers as csrc/comm/operation.h says."""

    ALLREDUCE = 0
    BROADCAST = 1
    ALLGATHER = 2
    REDUCE_SCATTER = 3
    REDUCE = 4
    GATHER = 5
    SCATTER = 6
    ALLTOALL = 7
    SEND = 8
    RECV = 9
    BARRIER = 10


class Item(IntEnum):
    """A tensor's items; what is only moved may be called U8."""

    F32 = 0
    F64 = 1
    F16 = 2
    BF16 = 3
    I8 = 4
    I16 = 5
    I32 = 6
    I64 = 7
    U8 = 8
    BOOL = 9


class Reduction(IntEnum):
    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6


class Outcome(IntEnum):
    GOOD = 0
    FAILED = 1
    TIMED_OUT = 2
    REFUSED = 3  # the arguments; the generation stands


class FrameError(RuntimeError):
    """Bytes that are no frame."""


Span = tuple[int, int]  # offset in the arena, or address of lent memory; bytes


@dataclass(frozen=True)
class Issue:
    """One operation.

    Attributes:
        number: given back in DONE; its own in this child.
        op: what to do.
        item: of the tensors.
        reduction: of sums and the like.
        peer: the root, or the other rank of a message; -1: any.
        tag: of messages.
        limit_ms: of the operation.
        outputs: spans.
        inputs: spans.
        flat: the ranks' parts, in `outputs` of an ALLGATHER and `inputs` of a REDUCE_SCATTER, are
            one piece of memory in their order, on all ranks.
    """

    number: int
    op: Op
    item: Item
    reduction: Reduction
    peer: int
    tag: int
    limit_ms: int
    outputs: list[Span]
    inputs: list[Span]
    flat: bool = False

    def frame(self) -> bytes:
        spans = [*self.outputs, *self.inputs]
        counts = len(self.outputs), len(self.inputs)
        kinds = self.op, self.item, self.reduction, self.flat
        fixed = self.number, *kinds, self.peer, self.tag, self.limit_ms
        payload = _ISSUE.pack(*fixed, *counts) + b"".join(_SPAN.pack(*span) for span in spans)
        return framed(Kind.ISSUE, payload)

    @classmethod
    def parse(cls, payload: bytes) -> Issue:
        reader = Reader(payload)
        number, op, item, reduction, flat, *rest = reader.fixed(_ISSUE)
        peer, tag, limit, outputs, inputs = rest
        if (outputs + inputs) * _SPAN.size > len(payload):
            raise FrameError(f"ISSUE: {outputs} outputs and {inputs} inputs in {len(payload)} B")
        spans = [_span(reader) for _ in range(outputs + inputs)]
        reader.end()
        kinds = Op(op), Item(item), Reduction(reduction)
        of_spans = spans[:outputs], spans[outputs:]
        return cls(number, *kinds, peer, tag, limit, *of_spans, bool(flat))


@dataclass(frozen=True)
class Configure:
    """What a child is told of its generation.

    Attributes:
        rank: of `size`.
        size: see rank.
        limit_ms: of forming it, and of operations that name none.
        heartbeat_ms: 0: off.
        local_sockets: whether Unix sockets may be used.
        store_port: where the store listens.
        name: the group's, in errors, alike on all ranks.
        address: to listen on, numeric: the parent has chosen it.
        ports: range; empty: any.
        store_host: see store_port.
        prefix: of all keys, for a child that has a client of its own to the store.
    """

    rank: int
    size: int
    limit_ms: int
    heartbeat_ms: int
    local_sockets: bool
    store_port: int
    name: str
    address: str
    ports: str
    store_host: str
    prefix: str

    def frame(self) -> bytes:
        numbers = self.rank, self.size, self.limit_ms, self.heartbeat_ms
        texts = self.name, self.address, self.ports, self.store_host, self.prefix
        fixed = _CONFIGURE.pack(*numbers, self.local_sockets, self.store_port)
        return framed(Kind.CONFIGURE, fixed + b"".join(packed_text(one) for one in texts))

    @classmethod
    def parse(cls, payload: bytes) -> Configure:
        reader = Reader(payload)
        rank, size, limit, heartbeat, local, port = reader.fixed(_CONFIGURE)
        texts = [reader.text() for _ in range(5)]
        reader.end()
        return cls(rank, size, limit, heartbeat, bool(local), port, *texts)


@dataclass(frozen=True)
class Done:
    """How an operation ended; `source`: the rank that a message came from, or that a failure was
    the doing of; -1: neither, or not known."""

    number: int
    outcome: Outcome
    source: int
    text: str

    def frame(self) -> bytes:
        fixed = _DONE.pack(self.number, self.outcome, self.source)
        return framed(Kind.DONE, fixed + packed_text(self.text))

    @classmethod
    def parse(cls, payload: bytes) -> Done:
        reader = Reader(payload)
        number, outcome, source = reader.fixed(_DONE)
        text = reader.text()
        reader.end()
        return cls(number, Outcome(outcome), source, text)


@dataclass(frozen=True)
class LentMemory:
    """An allocation of the parent's on a device, which the child may use until FORGET.

    Attributes:
        address: in the parent.
        count: bytes.
        device: index.
        handle: to open it with.
    """

    address: int
    count: int
    device: int
    handle: bytes

    def frame(self) -> bytes:
        fixed = _MEMORY.pack(self.address, self.count, self.device)
        return framed(Kind.MEMORY, fixed + packed_bytes(self.handle))

    def forget(self) -> bytes:
        return framed(Kind.FORGET, _ADDRESS.pack(self.address))


def ordered(event: int, device: int, handle: bytes) -> bytes:
    """Return the frame that says: what is issued next waits for this event of the parent's.

    Args:
        event: its number.
        device: its index.
        handle: to open it with; empty: the child has.
    """
    return framed(Kind.ORDER, _ORDER.pack(event, device) + packed_bytes(handle))


def framed(kind: Kind, payload: bytes = b"") -> bytes:
    """Return a whole frame.

    Raises:
        ValueError: it would be longer than MOST.
    """
    if len(payload) > MOST:
        raise ValueError(f"expected fewer tensors: a request of {len(payload)} B, at most {MOST}")
    return HEADER.pack(len(payload), kind) + payload


def packed_text(text: str) -> bytes:
    encoded = text.encode("utf-8", "replace")[:0xFFFF]
    return _LENGTH.pack(len(encoded)) + encoded


def packed_bytes(value: bytes) -> bytes:
    return NUMBER.pack(len(value)) + value


class Reader:
    """Takes a payload apart, from its beginning; raises FrameError where something lacks."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._at = 0

    def fixed(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self._take(layout.size))

    def text(self) -> str:
        (length,) = self.fixed(_LENGTH)
        return self._take(length).decode("utf-8", "replace")

    def blob(self) -> bytes:
        (length,) = self.fixed(NUMBER)
        return self._take(length)

    def end(self) -> None:
        if self._at != len(self._payload):
            raise FrameError(f"{len(self._payload) - self._at} B too many")

    def _take(self, length: int) -> bytes:
        taken = self._payload[self._at : self._at + length]
        if len(taken) < length:
            raise FrameError(f"{length - len(taken)} B too few")
        self._at += length
        return taken


def _span(reader: Reader) -> Span:
    offset, count = reader.fixed(_SPAN)
    return offset, count


class Inbox:
    """Makes frames of what a stream brings. One thread."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Yield the frames that are whole now.

        Raises:
            FrameError: these bytes are none.
        """
        self._bytes += data
        while len(self._bytes) >= HEADER.size:
            length, number = HEADER.unpack_from(self._bytes)
            if length > MOST or number not in _KINDS:
                raise FrameError(f"a frame of kind {number} and {length} B")
            end = HEADER.size + length
            if len(self._bytes) < end:
                return
            payload = bytes(self._bytes[HEADER.size : end])
            del self._bytes[:end]
            yield Kind(number), payload
