"""Tensors of a device that a group lends to its child process.

A child opens whole allocations by their handles (CUDA IPC). torch's allocator gives tensors parts
of allocations. So a handle refers to the allocation around a tensor, and a request says which part
it is. The child opens each allocation once. The parent makes it close those that are gone, because
a new allocation at the same address has another handle, and the oldest ones beyond MOST_KNOWN.

Stream order holds in one direction. A request waits, on the device, for an event that is recorded
on the caller's current stream at issue. But nothing on a device waits for a child: it may be killed
at any time, and that wait would never end. So a result counts once the child has reported it, and
wait() blocks the calling thread until then.

Owners: a child owns the memory that it was lent. Each operation holds its tensors, contiguous
copies included, until the child no longer uses them, or is gone. So their memory is not used for
anything else before. A child that reports a failure may still have kernels in that operation, or in
others that run at the same time. From then on it counts as using all of them until its end, and the
failure of the generation kills it.

| state of an operation | who may write the caller's tensors | what abort does |
|---|---|---|
| pending | kernels of the child | kills it, and waits for its end, at most QUIET |
| copying | the thread that completes it | waits for the copy, which ends as a success |
| failed in the child | kernels of the child | kills it, and waits for its end, at most QUIET |
| ended | nobody; after a failure kernels of a killed child that took longer than QUIET | nothing |
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from torchft_ext import _C
from torchft_ext import _pg_frames as frames
from torchft_ext._pg_arena import Arena
from torchft_ext._pg_child import Child
from torchft_ext._pg_staging import Staged, Stager

MOST_KNOWN = 256  # allocations that a child has open
QUIET = 0.04  # seconds that a failed operation's waiters wait for the end of a killed child
_streams: dict[torch.device, torch.Stream] = {}  # for copies out of what a child has written


class _Turn:
    """An event of this process's, for one operation at a time."""

    def __init__(self, number: int, device: int) -> None:
        self.number = number
        self.device = device
        self._event = _C._IpcEvent(device)
        self._handle = self._event.handle()

    def begun(self) -> bytes:
        """Record it on the current stream; return the frame that says so."""
        self._event.record()
        handle, self._handle = self._handle, b""
        return frames.ordered(self.number, self.device, handle)


class Lender:
    """What of this process's device memory one child knows. Threads: one at a time issues.

    What an operation adds counts with sent(); undo() takes it back.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, frames.LentMemory] = OrderedDict()  # the last used at the end
        self._unsent: list[bytes] = []
        self._before: tuple[OrderedDict[int, frames.LentMemory], list[bytes]] | None = None
        self._lock = threading.Lock()
        self._free: list[_Turn] = []
        self._turns = 0

    def span_of(self, tensor: torch.Tensor) -> frames.Span:
        """Return where a contiguous tensor lies, and have the child told of its memory."""
        count = tensor.numel() * tensor.element_size()
        if count == 0:
            return 0, 0
        address = tensor.data_ptr()
        device = tensor.device.index
        lent = frames.LentMemory(*_allocation_of(address, device))
        if self._known.get(lent.address) != lent:
            if self._before is None:
                self._before = self._known.copy(), self._unsent.copy()
            self._forget_where(lent)
            self._known[lent.address] = lent
            self._unsent.append(lent.frame())
        self._known.move_to_end(lent.address)
        return address, count

    def _forget_where(self, lent: frames.LentMemory) -> None:
        """Forget what lay where a new allocation lies."""
        end = lent.address + lent.count
        for known in list(self._known.values()):
            if known.address < end and lent.address < known.address + known.count:
                self._forget(known)

    def _forget(self, known: frames.LentMemory) -> None:
        del self._known[known.address]
        self._unsent.append(known.forget())

    def told(self, device: int) -> tuple[bytes, _Turn]:
        """Return the frames ahead of an operation on what span_of() was asked about, which waits
        for the current stream of the device; the turn goes to take_back()."""
        with self._lock:
            turn = next((one for one in self._free if one.device == device), None)
            if turn is not None:
                self._free.remove(turn)
        if turn is None:
            self._turns += 1
            turn = _Turn(self._turns, device)
        return b"".join([*self._unsent, turn.begun()]), turn

    def sent(self) -> None:
        """The child hears what told() gave."""
        self._before, self._unsent = None, []
        while len(self._known) > MOST_KNOWN:  # the next operation tells
            self._forget(next(iter(self._known.values())))

    def undo(self) -> None:
        """It hears nothing of this operation, whose turn, if it had one, is lost."""
        if self._before is not None:
            (self._known, self._unsent), self._before = self._before, None

    def take_back(self, turn: _Turn) -> None:
        with self._lock:
            self._free.append(turn)


def _allocation_of(address: int, device: int) -> tuple[int, int, int, bytes]:
    try:
        base, count, handle = _C._ipc_memory(address, device)
    except ValueError as error:
        raise ValueError(
            f"expected device memory that can be lent to another process, found one that cannot: "
            f"{error}; torch's expandable segments are such memory"
        ) from error
    return base, count, device, handle


class LendingChild(Child):
    """A child that works on this process's device memory."""

    def _new_arena(self) -> Arena | None:
        self._lender = Lender()
        self._until_gone: list[Callable[[], None]] = []
        return None

    def _span_of(self, tensor: torch.Tensor) -> frames.Span:
        return self._lender.span_of(tensor)

    def _prepared(self, given: list[Any]) -> tuple[bytes, Callable[[], None]]:
        lender, tensors = self._lender, list(_tensors_in(given))
        told, turn = lender.told(tensors[0].device.index)
        held = [tensors]

        def let_go() -> None:
            held.clear()
            lender.take_back(turn)

        return told, lambda: self._out_of(let_go)

    def _told(self) -> None:
        self._lender.sent()

    def _not_told(self) -> None:
        self._lender.undo()

    def _out_of(self, let_go: Callable[[], None]) -> None:
        """It has told that an operation is over, or it has ended."""
        with self._lock:
            stays = self._has_failed and self._ended is None
            if stays:
                self._until_gone.append(let_go)
        if not stays:
            let_go()

    def _end(self, text: str) -> None:
        super()._end(text)
        with self._lock:
            kept, self._until_gone = self._until_gone, []
        for let_go in kept:
            let_go()

    def _is_busy_to_the_last(self) -> bool:
        return super()._is_busy_to_the_last() or self._has_failed

    def silence(self) -> None:
        """Give it no more operations, and end it unless it is out of all; blocks until it has
        ended, QUIET at most."""
        if self._is_busy_to_the_last():
            self.kill()
            self.await_gone(QUIET)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _tensors_in(one)]
    return []


class DeviceRoom:
    """Room like that of any tensor, on the device of one operation's tensors."""

    def __init__(self) -> None:
        self.device: torch.device | None = None

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def release(self) -> None:
        pass


class DeviceStaged(Staged):
    """An operation whose results are copied, if at all, on a stream of their own."""

    def copy_out(self) -> None:
        """Write what the child did not write itself. Blocks until it is there."""
        if self.divisor == 1 and all(target is source for target, source in self.outputs):
            return
        device = self.outputs[0][0].device
        stream = _streams.setdefault(device, torch.Stream(device=device))
        index = torch.accelerator.current_device_index()  # set_stream() sets it, too
        before = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        try:
            super().copy_out()
            stream.synchronize()
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)


def _check_no_capture(device: int) -> None:
    if _C._ipc_capturing(device):
        raise RuntimeError(
            "expected no capture on the current stream: an operation in a child process cannot be "
            "part of a graph; use ProcessGroupNCCL, or call it outside of the capture"
        )


class DeviceStager(Stager):
    """Stages one operation of a rank on tensors of a device, which the child uses as they are.

    Those that are not contiguous are copied; a barrier is a sum of one byte.
    """

    def __init__(self, rank: int, size: int, device_type: str) -> None:
        self._on = DeviceRoom()
        self._device_type = device_type
        super().__init__(rank, size, False, self._on, reduce_scatters=True)

    def check_device(self, tensor: torch.Tensor) -> None:
        """Raise ValueError for a tensor where the child has none."""
        if tensor.device.type != self._device_type:
            raise ValueError(
                f"expected tensors on {self._device_type}, found one on {tensor.device}"
            )
        if self._on.device not in (None, tensor.device):
            raise ValueError(
                f"expected tensors on one device, found them on {self._on.device} and "
                f"{tensor.device}"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(f"expected dense tensors, found one of layout {tensor.layout}")
        if self._on.device is None:
            _check_no_capture(tensor.device.index)
        self._on.device = tensor.device

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        self.check_device(tensor)
        return tensor if tensor.is_contiguous() else tensor.detach().contiguous()

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        self.check_device(tensor)
        whole = tensor.is_contiguous()
        used = tensor if whole else self._room.empty(tensor.shape, tensor.dtype)
        self._outputs.append((tensor, used))
        return used

    def _stage(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Staged:
        if name != "barrier":
            return super()._stage(name, args, kwargs)
        for value in (*args, *kwargs.values()):
            self._plain(value)
        index = torch.get_device_module(self._device_type).current_device()
        _check_no_capture(index)
        return self._staged(
            "allreduce",
            (torch.zeros(1, dtype=torch.uint8, device=torch.device(self._device_type, index)),),
            {},
        )

    def _staged(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Staged:
        return DeviceStaged(*super()._staged(method, args, kwargs))
