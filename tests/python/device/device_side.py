"""What runs inside rank processes that have an accelerator: CUDA's or the simulated one."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import rankside
import torch
import torch.distributed as dist
from rankside import OPERATION_LIMIT, backend, kept, seconds, wait_until
from values import check, me

GPU = Path(__file__).resolve().parents[2] / "gpu"
if str(GPU) not in sys.path:
    sys.path.append(str(GPU))

import accelerator  # noqa: E402
from accelerator import device, stalled  # noqa: E402  (for the tests)

_made_for: tuple[object, ...] | None = None


def join(address: str, rank: int, size: int, name: str = "ft", **options: object) -> None:
    """Begin a generation of the long-lived default group; made anew when name or options differ."""
    import torchft_ext

    global _made_for
    accelerator.prepare()
    if accelerator.simulated():
        accelerator.simulator().reset()
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
        # For as long as the group lives: models that outlive a generation stay on it.
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    backend().set_timeout(seconds(OPERATION_LIMIT))
    rankside.configure_next(address, rank, size)


def init(spec: str, address: str, rank: int, size: int, bound: bool = False) -> None:
    """Make a default group whose first generation has this world; bound: to this rank's device."""
    import torchft_ext  # noqa: F401

    accelerator.prepare()
    leave()
    torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    dist.init_process_group(
        spec,
        store=rankside.connected_store(address),
        rank=rank,
        world_size=size,
        timeout=seconds(OPERATION_LIMIT),
        device_id=device() if bound else None,
    )


def leave() -> None:
    """Have the next join() make its group anew."""
    global _made_for
    _made_for = None
    rankside.leave_default_group()


def ones(*shape: int, value: float = 1.0) -> torch.Tensor:
    return torch.full(shape, float(value), device=device())


def stream_of_its_own() -> torch.Stream:
    """One that no communicator has: theirs are of normal priority.

    torch's pool hands its streams out in turn, those that communicators have taken among them.
    """
    return torch.Stream(device=device(), priority=-1)


def stream_waits_for(work: dist.Work) -> None:
    """Let the current stream wait for an operation that is about to fail, without blocking.

    Where the failure came first, wait() raises it, and has the stream wait all the same.
    """
    early = rankside.failure_of(work.wait)
    if early is not None:
        assert early.type == rankside.failure_of(work.check).type, early.text


def check_sum() -> None:
    """The generation works on the device: an exact sum over whatever world this is."""
    rank, world = me()
    tensor = ones(33, value=rank + 1.0)
    dist.all_reduce(tensor)
    backend().check()
    check(tensor.cpu(), torch.full((33,), world * (world + 1) / 2), "the sum over the generation")


def no_violation() -> None:
    assert accelerator.violations() == []


def hold(name: str = "gate") -> None:
    """Nothing enqueued on the current stream from here on begins until let_go(name)."""
    gate = stalled()
    kept[name] = (gate, gate.__enter__())


def let_go(name: str = "gate") -> None:
    kept.pop(name)[0].__exit__(None, None, None)


def keep_buffers(*tensors: torch.Tensor) -> None:
    """Remember tensors of a dead generation, and what they hold now."""
    torch.accelerator.synchronize()
    kept["buffers"] = [(tensor, tensor.cpu()) for tensor in tensors]


def buffers_are_unchanged() -> None:
    torch.accelerator.synchronize()
    for tensor, before in kept["buffers"]:
        now = tensor.cpu()
        assert torch.equal(now.view(torch.uint8), before.view(torch.uint8)), "a late write"


def reaped(patience: float = 20.0) -> None:
    """Wait until the communicators that were aborted are gone, as far as can be seen."""
    wait_until(lambda: "ft-nccl-abort" not in backend().stats()["threads"], "the reaper", patience)
