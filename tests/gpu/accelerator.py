"""The accelerator that device tests and benchmarks run on: CUDA's or the simulated (tests/sim).

TORCHFT_EXT_TEST_DEVICE=cuda or privateuseone (the default) chooses. On the simulated one NCCL is
simulated too, or NCCL's own library where TORCHFT_EXT_TEST_NCCL_HOST names the library of
tests/nccl_host. Whoever uses it calls prepare() in every rank, before the first group is made. What
they do differently is here and nowhere else.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

NAME = os.environ.get("TORCHFT_EXT_TEST_DEVICE", "privateuseone")
SIM = Path(__file__).resolve().parents[1] / "sim"

# Several ranks on one GPU. NCCL refuses two of one host on one device: prepare() gives each
# process a host of its own, and all traffic goes over sockets. Contexts are time-sliced, so kernels
# stay small.
SHARED_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # no stream waits in a queue behind another one's kernel
}

# NCCL's own library under the simulated device, if so.
NCCL_HOST = os.environ.get("TORCHFT_EXT_TEST_NCCL_HOST", "") if NAME == "privateuseone" else ""
# The one algorithm and protocol whose kernels are in tests/nccl_host.
HOST_KERNELS = {
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_P2P_LL_THRESHOLD": "0",
    "NCCL_CUMEM_ENABLE": "0",
}


def simulated() -> bool:
    """The device is."""
    return NAME == "privateuseone"


def nccl_simulated() -> bool:
    """Faults can be injected into NCCL, and its communicators be counted."""
    return simulated() and not NCCL_HOST


@functools.cache
def nccl_host() -> Any:
    """The operators of tests/nccl_host."""
    simulator()
    torch.ops.load_library(NCCL_HOST)
    return torch.ops.torchft_ext_nccl_host


def environment(shared: bool = True) -> dict[str, str]:
    """What a rank's process must be started with. shared: others may be on the same device."""
    if not simulated():
        return {"TORCHFT_EXT_TEST_DEVICE": NAME, **(SHARED_GPU if shared else {})}
    passed = (
        "TORCHFT_EXT_SIM_LIB",
        "TORCHFT_EXT_BUILD_ROOT",
        "TORCHFT_EXT_TEST_NCCL_HOST",
        "TORCHFT_EXT_NCCL_LIB",
        "NCCL_DEBUG",
    )
    given = {name: os.environ[name] for name in passed if name in os.environ}
    return {**given, **SHARED_GPU, **HOST_KERNELS} if NCCL_HOST else given


def simulator() -> ModuleType:
    """The simulator. Loaded in ranks alone: it stays in a process for good."""
    if str(SIM) not in sys.path:
        sys.path.append(str(SIM))
    return importlib.import_module("simulator")


def shared_by(ranks: int) -> bool:
    """Whether so many ranks have to share real devices."""
    return not simulated() and ranks > torch.accelerator.device_count()


def prepare() -> None:
    """Make this process a rank: give "ft" and "ft:nccl" their device. It may be called again."""
    if not nccl_simulated():
        os.environ.setdefault("NCCL_HOSTID", f"torchft-ext-{os.getpid()}")
    if not simulated():
        return
    nccl_host().install() if NCCL_HOST else simulator().install()
    for name, devices in dist.Backend.backend_capability.items():
        if name in ("ft", "ft:nccl", "ft_nccl") and NAME not in devices:
            devices.append(NAME)


def prepare_children() -> None:
    """As prepare(), for groups whose NCCL runs in child processes, which are simulated, too, and
    open the memory that is allocated from now on."""
    prepare()
    simulator().share_memory()
    children: Any = importlib.import_module("torchft_ext._pg_baby")
    children._NCCL_CHILD = simulator().LIBRARY.parent / "torchft_ext_sim_child"


def device() -> torch.device:
    return torch.device(NAME, torch.accelerator.current_device_index())


def violations() -> list[str]:
    """What was done wrong on the device, as far as it tells. Waits until the device is idle."""
    torch.accelerator.synchronize()  # CUDA raises here what a kernel did wrong
    if not simulated():
        return []
    found = list(simulator().violations())
    # They live within a call only.
    left = simulator().report()["counts"].get("live_reductions", 0)
    return [*found, f"{left} reductions were not destroyed"] if left else found


def device_bytes() -> int:
    """Memory in use on the current device, by anybody; allocations where it is simulated."""
    if simulated():
        of_nccl = int(nccl_host().live_allocations()) if NCCL_HOST else 0
        return int(simulator().report()["live_allocations"]) + of_nccl
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def tensor_bytes() -> int:
    """Memory that tensors of this process have; allocations where it is simulated."""
    if simulated():
        return int(simulator().report()["live_allocations"])
    return int(torch.cuda.memory_allocated())


def warm_up() -> None:
    """Make the device's context, which takes seconds on a real one."""
    if not simulated():
        torch.ones(1, device=device()).add_(1)
        torch.accelerator.synchronize()


def live_communicators() -> int:
    """As far as it can be counted."""
    return int(simulator().report()["live_communicators"]) if nccl_simulated() else 0


def stalled() -> AbstractContextManager[Callable[[], None]]:
    """The current stream does not get beyond this point while the block runs.

    The block may open it sooner, by calling what `with` gives.
    """
    return _stalled_simulator() if simulated() else _stalled_cuda()


@contextmanager
def _stalled_simulator() -> Iterator[Callable[[], None]]:
    with simulator().gate() as release:
        yield release


_words: list[torch.Tensor] = []  # never freed: the pool of pinned memory might reset one too soon


@contextmanager
def _stalled_cuda() -> Iterator[Callable[[], None]]:
    word = torch.zeros(1, dtype=torch.int32).pin_memory()
    _words.append(word)
    wait_value = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    wait_value.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    until_at_least = 0  # CU_STREAM_WAIT_VALUE_GEQ
    stream = torch.cuda.current_stream().cuda_stream
    status = wait_value(stream, word.data_ptr(), 1, until_at_least)
    if status != 0:
        raise RuntimeError(f"cuStreamWaitValue32 failed: CUresult {status}")

    def release() -> None:
        word[0] = 1

    try:
        yield release
    finally:
        release()


def mem_pool() -> Any:
    """A pool of device memory, as torch.cuda.MemPool is one."""
    return simulator().MemPool() if simulated() else torch.cuda.MemPool()


def made_in(pool: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A tensor whose memory is the pool's."""
    if simulated():
        made: torch.Tensor = pool.make(make)
        return made
    with torch.cuda.use_mem_pool(pool):
        return make()


def registrations() -> int | None:
    """How much is registered in live communicators; None: it cannot be counted."""
    if not nccl_simulated():
        return None
    return int(simulator().report()["counts"].get("live_registrations", 0))


class Graph:
    """What is enqueued in `with graph.capture():`, to be enqueued again by replay()."""

    def __init__(self) -> None:
        self._graph: Any = simulator().Graph() if simulated() else torch.cuda.CUDAGraph()

    def capture(self, errors: str = "global") -> AbstractContextManager[None]:
        """errors: whose unsafe calls spoil it (`capture_error_mode` of `torch.cuda.graph`)."""
        captured: AbstractContextManager[None]
        if simulated():
            captured = self._graph.capture()
        else:
            captured = torch.cuda.graph(self._graph, capture_error_mode=errors)
        return captured

    def replay(self) -> None:
        self._graph.replay()

    def free(self) -> None:
        self._graph.free() if simulated() else self._graph.reset()
