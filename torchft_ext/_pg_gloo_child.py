"""The child process of a ProcessGroupBabyGloo: torch's gloo, at the other end of `_pg_frames.py`.

    python -c "from torchft_ext._pg_gloo_child import main; main()" PARENT

Threads: the main one reads requests and gives them to gloo, in order; gloo's own, and helpers for
messages, tell of ends; `ft-parent` ends the process once its parent is gone, whatever gloo does.
The other thing that ends it is the parent's signal.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from torchft_ext import _pg_frames as frames
from torchft_ext._pg_child import ARENA, SOCKET
from torchft_ext._pg_frames import Issue, Item, Kind, Op, Outcome, Reduction
from torchft_ext._pg_helpers import helpers
from torchft_ext_names import gloo

_DTYPES = {
    Item.F32: torch.float32,
    Item.F64: torch.float64,
    Item.F16: torch.float16,
    Item.BF16: torch.bfloat16,
    Item.I8: torch.int8,
    Item.I16: torch.int16,
    Item.I32: torch.int32,
    Item.I64: torch.int64,
    Item.U8: torch.uint8,
    Item.BOOL: torch.bool,
}
_OPS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.BAND: dist.ReduceOp.BAND,
    Reduction.BOR: dist.ReduceOp.BOR,
    Reduction.BXOR: dist.ReduceOp.BXOR,
}
Tensors = list[torch.Tensor]


class Server:
    """What the parent's requests make happen."""

    def __init__(self, channel: socket.socket, memory: mmap.mmap) -> None:
        self._channel = channel
        self._memory = memory
        self._sending = threading.Lock()
        self._group: Any = None

    def send(self, data: bytes) -> None:
        with self._sending, suppress(OSError):  # the parent is gone, and so is this process soon
            self._channel.sendall(data)

    def serve(self) -> None:
        """Return once the parent says so, or is gone."""
        self.send(frames.framed(Kind.HELLO, frames.NUMBER.pack(frames.VERSION)))
        inbox = frames.Inbox()
        while data := self._channel.recv(1 << 16):
            for kind, payload in inbox.feed(data):
                if kind is Kind.QUIT:
                    return
                self._heard(kind, payload)

    def _heard(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.CONFIGURE and self._group is None:
            self._configure(frames.Configure.parse(payload))
        elif kind is Kind.ISSUE and self._group is not None:
            self._issue(Issue.parse(payload))
        else:
            raise frames.FrameError(f"{kind.name}, which has no place here")

    def _configure(self, told: frames.Configure) -> None:
        limit = timedelta(milliseconds=told.limit_ms)
        outcome, text = Outcome.GOOD, ""
        try:
            client = dist.TCPStore(
                told.store_host, told.store_port, None, False, limit, wait_for_workers=False
            )
            store = dist.PrefixStore(told.prefix, client)
            theirs = gloo(c10d)
            options = theirs._Options()
            options._timeout = limit
            options._devices = [theirs.create_device(hostname=told.address)]
            self._group = theirs(store, told.rank, told.size, options)
        except Exception as error:
            outcome, text = Outcome.FAILED, str(error)
        payload = frames.OUTCOME.pack(outcome) + frames.packed_text(text)
        self.send(frames.framed(Kind.CONFIGURED, payload))

    def _issue(self, issue: Issue) -> None:
        try:
            join = _joined if issue.op is Op.ALLTOALL else list
            outputs = [self._tensor(span, issue.item) for span in join(issue.outputs)]
            inputs = [self._tensor(span, issue.item) for span in join(issue.inputs)]
            work = _ISSUERS[issue.op](_Gloo(self._group, issue), outputs, inputs)
        except frames.FrameError:
            raise
        except Exception as error:
            if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
                self._failed(issue, error)
            else:
                self._done(issue, Outcome.REFUSED, -1, str(error))
            return
        if issue.op in (Op.SEND, Op.RECV):
            helpers.run(lambda: self._attend(issue, work))
        else:
            keep = outputs, inputs
            work.get_future().add_done_callback(lambda future: self._ended(issue, future, keep))

    def _tensor(self, span: frames.Span, item: Item) -> torch.Tensor:
        offset, count = span
        dtype = _DTYPES[item]
        if offset + count > len(self._memory) or count % dtype.itemsize:
            raise frames.FrameError(f"a span of {count} B at {offset}")
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(
            self._memory, dtype=dtype, count=count // dtype.itemsize, offset=offset
        )

    def _attend(self, issue: Issue, work: dist.Work) -> None:
        """Wait for a message, whose work has no future."""
        try:
            work.wait(timedelta(milliseconds=issue.limit_ms))
            source = work._source_rank() if issue.op is Op.RECV and issue.peer < 0 else -1
        except Exception as error:
            self._failed(issue, error)
        else:
            self._done(issue, Outcome.GOOD, source, "")

    def _ended(self, issue: Issue, future: Future[Any], _keep: object) -> None:
        try:
            value = future.value()
        except Exception as error:
            value = error
        if isinstance(value, Exception):
            self._failed(issue, value)
        else:
            self._done(issue, Outcome.GOOD, -1, "")

    def _failed(self, issue: Issue, error: Exception) -> None:
        late = "imed out" in str(error) or "imeout" in str(error)
        self._done(issue, Outcome.TIMED_OUT if late else Outcome.FAILED, -1, str(error))

    def _done(self, issue: Issue, outcome: Outcome, source: int, text: str) -> None:
        self.send(frames.Done(issue.number, outcome, source, text).frame())


class _Gloo:
    """One request, as a call of gloo's."""

    def __init__(self, group: Any, issue: Issue) -> None:
        self._group = group
        self._issue = issue

    def _options(self, kind: Any) -> Any:
        options = kind()
        options.timeout = timedelta(milliseconds=self._issue.limit_ms)
        if hasattr(options, "reduceOp"):
            options.reduceOp = _OPS[self._issue.reduction]
        if hasattr(options, "rootRank"):
            options.rootRank = self._issue.peer
        return options

    def allreduce(self, outputs: Tensors, _inputs: Tensors) -> Any:
        return self._group.allreduce(outputs, self._options(dist.AllreduceOptions))

    def broadcast(self, outputs: Tensors, _inputs: Tensors) -> Any:
        return self._group.broadcast(outputs, self._options(dist.BroadcastOptions))

    def allgather(self, outputs: Tensors, inputs: Tensors) -> Any:
        options = self._options(AllgatherOptions)
        return self._group.allgather([outputs], inputs, options)

    def reduce(self, outputs: Tensors, _inputs: Tensors) -> Any:
        return self._group.reduce(outputs, self._options(dist.ReduceOptions))

    def gather(self, outputs: Tensors, inputs: Tensors) -> Any:
        options = self._options(dist.GatherOptions)
        return self._group.gather([outputs] if outputs else [], inputs, options)

    def scatter(self, outputs: Tensors, inputs: Tensors) -> Any:
        options = self._options(dist.ScatterOptions)
        return self._group.scatter(outputs, [inputs] if inputs else [], options)

    def alltoall(self, outputs: Tensors, inputs: Tensors) -> Any:
        size = _DTYPES[self._issue.item].itemsize
        given = self._issue.outputs, self._issue.inputs
        splits = [[count // size for _, count in spans] for spans in given]
        options = self._options(dist.AllToAllOptions)
        return self._group.alltoall_base(outputs[0], inputs[0], *splits, options)

    def send(self, _outputs: Tensors, inputs: Tensors) -> Any:
        return self._group.send(inputs, self._issue.peer, self._issue.tag)

    def recv(self, outputs: Tensors, _inputs: Tensors) -> Any:
        if self._issue.peer < 0:
            return self._group.recv_anysource(outputs, self._issue.tag)
        return self._group.recv(outputs, self._issue.peer, self._issue.tag)

    def barrier(self, _outputs: Tensors, _inputs: Tensors) -> Any:
        return self._group.barrier(self._options(dist.BarrierOptions))


_ISSUERS: dict[Op, Callable[[_Gloo, Tensors, Tensors], Any]] = {
    Op.ALLREDUCE: _Gloo.allreduce,
    Op.BROADCAST: _Gloo.broadcast,
    Op.ALLGATHER: _Gloo.allgather,
    Op.REDUCE: _Gloo.reduce,
    Op.GATHER: _Gloo.gather,
    Op.SCATTER: _Gloo.scatter,
    Op.ALLTOALL: _Gloo.alltoall,
    Op.SEND: _Gloo.send,
    Op.RECV: _Gloo.recv,
    Op.BARRIER: _Gloo.barrier,
}


def _joined(spans: list[frames.Span]) -> list[frames.Span]:
    """Return the one span that these, each where the last one ends, are parts of."""
    filled = [span for span in spans if span[1]]
    begin = at = filled[0][0] if filled else 0
    for offset, count in filled:
        if offset != at:
            raise frames.FrameError("parts that do not lie behind one another")
        at += count
    return [(begin, at - begin)]


def _await_parent(parent: int) -> None:
    """End the process when the parent's end of the socket, or the parent, is gone."""
    poll = select.poll()
    poll.register(SOCKET, select.POLLRDHUP)
    with suppress(OSError):  # a kernel without it; or the parent is gone
        poll.register(os.pidfd_open(parent), select.POLLIN)
    if os.getppid() == parent:
        poll.poll()
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(
        target=_await_parent, args=(int(sys.argv[1]),), name="ft-parent", daemon=True
    ).start()
    torch.set_num_threads(1)
    channel = socket.socket(fileno=SOCKET)
    memory = mmap.mmap(ARENA, os.fstat(ARENA).st_size, mmap.MAP_SHARED)
    os.close(ARENA)
    status = 0
    try:
        Server(channel, memory).serve()
    except BaseException:
        traceback.print_exc()
        status = 3
    os._exit(status)  # gloo's threads and torch's destructors are not waited for
