"""The simulated device and NCCL, loaded into this process (tests/sim/README.md).

Importing it loads the library: `torch.ones(3, device="privateuseone:0")` works from then on.
install() puts it under the NCCL engine. TORCHFT_EXT_SIM_LIB names the library where it is not in
build/dev.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypedDict

import torch

import torchft_ext  # noqa: F401  # first: its core library is the one that the simulator finds

DEVICE = "privateuseone"
ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("TORCHFT_EXT_BUILD_ROOT", ROOT / "build"))
LIBRARY = Path(os.environ.get("TORCHFT_EXT_SIM_LIB", BUILD / "dev/tests/sim/libtorchft_ext_sim.so"))

torch.ops.load_library(str(LIBRARY))
_ops = torch.ops.torchft_ext_sim


class DeviceModule(ModuleType):
    """What torch looks for under `torch.privateuseone`: DDP, FSDP2 and DeviceMesh ask it."""

    Stream = torch.Stream
    Event = torch.Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _lazy_init(self) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return int(torch._C._accelerator_hooks_device_count())  # the public one asks this module

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: torch.device | int | str) -> None:
        if isinstance(device, str):
            device = torch.device(device)
        torch.accelerator.set_device_index(device)

    def current_stream(self, device: torch.device | int | None = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    @contextmanager
    def device(self, device: torch.device | int) -> Iterator[None]:
        index = device.index if isinstance(device, torch.device) else device
        before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(index)
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)

    def synchronize(self, device: torch.device | int | None = None) -> None:
        torch.accelerator.synchronize(device)

    # Random numbers are made on the host, from its own state.

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: torch.device | int | None = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device | int | None = None) -> None:
        pass


torch._register_device_module(DEVICE, DeviceModule(f"torch.{DEVICE}"))


class Report(TypedDict):
    violations: list[str]
    counts: dict[str, int]
    live_communicators: int
    live_roots: int
    captured_communicators: int
    live_allocations: int
    live_segments: int


def install() -> None:
    """Put the simulator under every NCCL engine that is made from now on."""
    _ops.install()


def share_memory(share: bool = True) -> None:
    """Say whether memory that is allocated from now on lies where other processes can open it."""
    _ops.share_memory(share)


def inject(line: str) -> None:
    """Inject a fault, as tests/sim/sim_faults.h says: inject("hang allreduce count=1")."""
    _ops.inject(line)


def report() -> Report:
    """What was counted, what is alive, and what was done wrong."""
    found: Report = json.loads(_ops.report())
    return found


def reset() -> None:
    """Forget faults, violations and sums."""
    _ops.reset()


def violations() -> list[str]:
    return report()["violations"]


@contextmanager
def gate() -> Iterator[Callable[[], None]]:
    """The current stream does not get beyond this point while the block runs.

    The block may open it sooner, by calling what `with` gives.
    """
    standing = [_ops.stall()]

    def release() -> None:
        while standing:
            _ops.release(standing.pop())

    try:
        yield release
    finally:
        release()


class MemPool:
    """Stands in for torch.cuda.MemPool: the tensors that make() made are its segments."""

    _last = 0

    def __init__(self) -> None:
        MemPool._last += 1
        self.id = (0, MemPool._last)
        self._tensors: list[torch.Tensor] = []

    def make(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor in a segment of its own, which lives as long as the pool."""
        self._tensors.append(make())
        return self._tensors[-1]

    def snapshot(self, include_traces: bool = True) -> list[dict[str, object]]:
        return [
            {
                "address": tensor.untyped_storage().data_ptr(),
                "total_size": tensor.untyped_storage().nbytes(),
                "device": tensor.device.index,
                "segment_pool_id": self.id,
            }
            for tensor in self._tensors
        ]


class Graph:
    """What is enqueued in `with graph.capture():`, to be enqueued again by replay()."""

    def __init__(self) -> None:
        self._number: int | None = None

    @contextmanager
    def capture(self, stream: torch.Stream | None = None) -> Iterator[None]:
        module = torch.get_device_module(DEVICE)
        with module.stream(stream or torch.Stream(device=module.current_device())):
            self._number = _ops.begin_capture()
            try:
                yield
            finally:
                joined = _ops.end_capture()
        if not joined:
            raise RuntimeError("a stream that was drawn into the capture was not joined again")

    def replay(self) -> None:
        _ops.replay(self._number)

    def free(self) -> None:
        if self._number is not None:
            _ops.free_graph(self._number)
        self._number = None
