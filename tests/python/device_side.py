"""What runs inside rank processes whose accelerator is simulated (tests/sim)."""

from __future__ import annotations

import os
import time
from types import ModuleType

import rankside
import torch
import torch.distributed as dist
from rankside import OPERATION_LIMIT, backend, seconds
from values import check, me

_made_for: tuple[object, ...] | None = None


def simulator() -> ModuleType:
    """The simulator (tests/sim). Loaded in ranks alone: it stays in a process for good."""
    import simulator

    return simulator


def prepare() -> None:
    """Give "ft" and "ft:nccl" the simulated device, as a machine with one would."""
    simulator().install()
    for name, devices in dist.Backend.backend_capability.items():
        if name in ("ft", "ft:nccl", "ft_nccl") and simulator().DEVICE not in devices:
            devices.append(simulator().DEVICE)


def join(address: str, rank: int, size: int, name: str = "ft", **options: object) -> None:
    """Begin an epoch of the long-lived default group; made anew when name or options differ."""
    import torchft_ext

    global _made_for
    prepare()
    simulator().reset()
    key = (name, *sorted(options.items()))
    if _made_for != key or not dist.is_initialized():
        rankside.leave_default_group()
        dist.init_process_group(
            name,
            store=rankside.connected_store(address, f"alone/{os.getpid()}/{time.monotonic()}"),
            rank=0,
            world_size=1,
            timeout=seconds(OPERATION_LIMIT),
            pg_options=torchft_ext.Options(**options) if options else None,
        )
        _made_for = key
        # For as long as the group lives: models that outlive an epoch stay on it.
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    backend().set_timeout(seconds(OPERATION_LIMIT))
    rankside.configure_next(address, rank, size)


def device() -> torch.device:
    return torch.device(simulator().DEVICE, torch.accelerator.current_device_index())


def ones(*shape: int, value: float = 1.0) -> torch.Tensor:
    return torch.full(shape, float(value), device=device())


def check_sum() -> None:
    """The epoch works on the device: an exact sum over whatever world this is."""
    rank, world = me()
    tensor = ones(33, value=rank + 1.0)
    dist.all_reduce(tensor)
    backend().check()
    check(tensor.cpu(), torch.full((33,), world * (world + 1) / 2), "the sum over the epoch")


def no_violation() -> None:
    assert simulator().violations() == []


def inject(line: str) -> None:
    simulator().inject(line)
