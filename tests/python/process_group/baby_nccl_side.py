"""What runs in ranks whose group has NCCL in a child process, all of it simulated."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import baby_side
import device_side
import process_group_side
import torch
import torch.distributed._functional_collectives as functional
from device_side import accelerator, device
from process_group_side import LIMIT, held
from rankside import ErrorInfo, failure_of, kept, wait_until
from torch.nn.parallel import DistributedDataParallel

from torchft_ext import _pg_frames as frames
from torchft_ext import _pg_lent
from torchft_ext import process_group as pgs
from torchft_ext.errors import CommAbortedError


def prepare(violations: str) -> None:
    """Have the children simulated, too, and tell there what they do wrong."""
    accelerator.prepare_children()
    os.environ["TORCHFT_EXT_SIM_VIOLATIONS"] = violations


def join(violations: str, kind: str, address: str, rank: int, size: int) -> None:
    prepare(violations)
    torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    process_group_side.join(kind, address, rank, size)


def await_spare() -> int:
    """The process that the next configure() takes."""
    return baby_side.await_spare(kept["group"])


def on_device(operations: Callable[[], list[torch.Tensor]]) -> list[object]:
    """What operations give whose tensors are made on this rank's device."""
    with device():
        tensors = operations()
    return [tensor.cpu().tolist() for tensor in tensors]


def ramp(count: int = 8) -> torch.Tensor:
    return torch.arange(float(count), device=device()) + 10 * kept["group"].rank()


def parts_of_tensors() -> list[list[float]]:
    """Sums of a part of a tensor, of a column, and of what a view of another shape has."""
    group = kept["group"]
    whole, matrix, transposed = ramp(), ramp(8).view(4, 2), ramp(6).view(2, 3)
    group.allreduce([whole[2:5]]).wait()
    group.allreduce([matrix[:, 1]]).wait()
    group.allreduce([transposed.t()]).wait()
    return [one.cpu().flatten().tolist() for one in (whole, matrix, transposed)]


def messages() -> list[list[float]]:
    """Around the ring, at once, into every second item of a tensor."""
    group, rank, size = kept["group"], kept["group"].rank(), kept["group"].size()
    received = torch.zeros(16, device=device())
    works = [
        group.send([ramp()], (rank + 1) % size, 0),
        group.recv([received[::2]], (rank - 1) % size, 0),
    ]
    for work in works:
        work.wait()
    return received[::2].cpu().tolist()


def several_under_way() -> list[float]:
    group = kept["group"]
    tensors = [ramp() + number for number in range(20)]
    works = [group.allreduce([one]) for one in tensors]
    futures = [work.get_future() for work in works[:2]]
    assert futures[1].wait()[0] is tensors[1]
    for work in reversed(works):
        work.wait()
    return [one[0].item() for one in tensors]


def functional_sum() -> list[float]:
    group = kept["group"].register("lent")
    try:
        return functional.wait_tensor(functional.all_reduce(ramp(2), "sum", group)).cpu().tolist()
    finally:
        group.unregister()


def train() -> list[float]:
    """The gradients that all ranks have after a step."""
    group = kept["group"]
    model = DistributedDataParallel(torch.nn.Linear(2, 1).to(device()), process_group=group)
    model(torch.full((1, 2), float(group.rank()), device=device())).sum().backward()
    return model.module.weight.grad.cpu()[0].tolist()


def sum_of_what_the_stream_writes_later() -> tuple[bool, float, float]:
    """Whether it was complete before; the sum; what the stream then makes of it."""
    group = kept["group"]
    tensor = torch.zeros(4, device=device())
    group.barrier().wait()
    with accelerator.stalled() as let_go:
        tensor.add_(group.rank() + 1.0)
        work = group.allreduce([tensor])
        for _ in range(50):  # in whose time what does not wait for this stream has run
            kept["probe"].allreduce([torch.zeros(1)]).wait()
        early = work.is_completed()
        let_go()
        work.wait()
    total = tensor[0].item()
    tensor.mul_(2)
    return early, total, tensor[0].item()


def join_probe(address: str, rank: int, size: int) -> None:
    """A group beside, on the CPU."""
    kept["probe"] = pgs.ProcessGroupHost(timeout=LIMIT)
    kept["probe"].configure(address, rank, size)


def leave_probe() -> None:
    kept.pop("probe").shutdown()


def blocked_sum() -> tuple[ErrorInfo, int]:
    """A sum that not all ranks take part in; its failure, and the child that it was in."""
    group = kept["group"]
    pid = group.child_pid()
    error = failure_of(lambda: group.allreduce([ramp()]).wait())
    assert error is not None
    return error, pid


def whole_sum() -> float:
    tensor = ramp()
    kept["group"].allreduce([tensor]).wait()
    return tensor[0].item()


def leave(violations: str) -> None:
    """And assert that neither this process nor a child has misused the device."""
    group = kept.pop("group")
    group.shutdown()
    wait_until(lambda: group.retired() == 0, "the child's goodbye")
    device_side.no_violation()
    found = Path(violations)
    assert not found.exists(), found.read_text()


def sums_over_memory_that_was_freed(count: int) -> tuple[list[float], int]:
    """Sums of tensors one after another, each in an allocation of its own, and of how many the
    address had been another's before."""
    group = kept["group"]
    found, addresses = [], []
    for number in range(count):
        tensor = torch.full((1 << 19,), float(number), device=device())
        group.allreduce([tensor]).wait()
        found.append(tensor[-1].item())
        addresses.append(tensor.data_ptr())
        del tensor
    return found, count - len(set(addresses))


def open_in_child(most: int) -> tuple[list[float], int]:
    """What tensors hold, each in an allocation of its own, that a child used twice which may have
    so many open; and how many it has."""
    before, _pg_lent.MOST_KNOWN = _pg_lent.MOST_KNOWN, most
    group = kept["group"]
    try:
        tensors = [torch.full((1 << 19,), float(n), device=device()) for n in range(3 * most)]
        for tensor in [*tensors, *tensors]:
            group.allreduce([tensor]).wait()
        group.allreduce([tensors[-1]]).wait()  # tells of what was forgotten
        maps = Path(f"/proc/{group.child_pid()}/maps").read_text()
        return [one[0].item() for one in tensors], maps.count("torchft_ext_sim-memory")
    finally:
        _pg_lent.MOST_KNOWN = before


def refusals() -> list[str]:
    """Words on what a child cannot have; the generation stands."""
    group = kept["group"]
    elsewhere = torch.ones(1, device=f"{accelerator.NAME}:1")
    accelerator.simulator().share_memory(False)
    unshared = torch.ones(1, device=device())
    accelerator.simulator().share_memory()
    calls = [
        lambda: group.allreduce([torch.ones(1)]),
        lambda: group.allreduce_coalesced([ramp(), elsewhere]),
        lambda: group.allreduce([ramp().to(torch.int16)]).wait(),
        lambda: group.recv_anysource([ramp()], 0).wait(),
        lambda: group.allreduce([unshared]),
    ]
    found = [failure_of(call) for call in calls]
    assert all("ValueError" in error.kinds for error in found), found
    assert group.errored() is None
    whole_sum()
    return [error.text for error in found]


def all_held() -> dict[str, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        **held(),
        "mapped files": maps.count("memfd:torchft_ext"),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "allocations": accelerator.tensor_bytes(),
        "segments": int(accelerator.simulator().report()["live_segments"]),
        "events": int(accelerator.simulator().report()["counts"].get("live_ipc_events", 0)),
    }


def generations(address: str, first: int, count: int) -> None:
    """Alone; every second one is killed in mid-operation."""
    group = kept["group"]
    for number in range(first, first + count):
        group.configure(f"{address}/{number}", 0, 1)
        group.allreduce([ramp()]).wait()
        if number % 2:
            os.kill(group.child_pid(), signal.SIGSTOP)
            work = group.allreduce([ramp()])
            os.kill(group.child_pid(), signal.SIGKILL)
            assert "was ended by SIGKILL" in failure_of(work.wait).text
            del work
    wait_until(lambda: group.retired() == 0, "the end of old children")
    await_spare()


def grown_by_generations(address: str) -> dict[str, int]:
    """What 8 of them leave behind."""
    generations(address, 0, 3)
    kept["group"].configure(f"{address}/before", 0, 1)
    before = all_held()
    before["task"] += 2  # helpers, which stay: as many as were needed at one time
    generations(address, 3, 8)
    kept["group"].configure(f"{address}/after", 0, 1)

    def grown() -> dict[str, int]:
        return {name: count for name, count in all_held().items() if count > before[name]}

    limit = time.monotonic() + 10
    while grown() and time.monotonic() < limit:
        time.sleep(0.05)
    return grown()


def memory_kept_for_a_child(address: str, tells: bool) -> tuple[bool, bool]:
    """Whether an operation's memory was there after it failed, with its child in no hurry to end,
    and whether the child was killed; the memory goes once it has ended.

    tells: the child itself says that it failed, and not the parent.
    """
    group = kept["group"]
    group.configure(address, 0, 1)
    before = accelerator.tensor_bytes()
    child = group._formed.backends[0]
    os.kill(child.pid, signal.SIGSTOP)
    work = group.allreduce([ramp()])
    kills: list[int] = []
    kill, child.kill = child.kill, lambda: kills.append(1)  # as a driver that takes its time
    if tells:
        child._done(frames.Done(max(child._works), frames.Outcome.FAILED, -1, "a test"))
    else:
        group._formed.generation.abort("a test")
    assert failure_of(work.wait) is not None
    del work
    gc.collect()
    kept_then = accelerator.tensor_bytes() > before
    child.kill = kill
    kill()
    wait_until(lambda: accelerator.tensor_bytes() <= before, "the end of what the child had")
    return kept_then, bool(kills)


def sent_after_the_failure() -> int:
    """How much a child heard of an operation whose generation failed while it was issued."""
    group = kept["group"]
    child, generation = group._formed.backends[0], group._formed.generation
    sent: list[bytes] = []
    prepared, child._send = child._prepared, sent.append

    def failing(given: list[object]) -> object:
        generation.fail(CommAbortedError("a test"))
        return prepared(given)

    child._prepared = failing
    error = failure_of(lambda: group.allreduce([ramp()]).wait())
    assert error is not None and error.type == "CommAbortedError", error
    del child._send
    return len(sent)


def errors_of_a_child_that_stays(address: str) -> tuple[list[str], bool]:
    """What abort() and configure() raise where the process of a child that was killed does not end,
    and whether configure() had begun another generation then."""
    group = kept["group"]
    child, generation = group._formed.backends[0], group._guard.generation
    gone, child.await_gone = child.await_gone, lambda limit: False
    child.kill()
    errors = [failure_of(group.abort), failure_of(lambda: group.configure(address, 0, 1))]
    began = group._guard.generation != generation
    child.await_gone = gone
    group.configure(f"{address}/again", 0, 1)
    whole_sum()
    return [error.text if error else "" for error in errors], began


def sums_after_a_refusal() -> float:
    """A sum after a call that was refused for its second tensor, once the first one is gone."""
    group = kept["group"]
    accelerator.simulator().share_memory(False)
    unshared = torch.ones(1 << 19, device=device())
    accelerator.simulator().share_memory()
    tensors = [torch.ones(1 << 19, device=device()), unshared]
    error = failure_of(lambda: group.allreduce_coalesced(tensors))
    assert error is not None and "ValueError" in error.kinds, error
    tensors.clear()
    gc.collect()
    return whole_sum()


def errors_in_a_capture() -> list[str]:
    """What operations raise beside an open capture of the current stream, which stays whole."""
    group, tensor, graph = kept["group"], ramp(), accelerator.Graph()
    torch.accelerator.synchronize()
    with graph.capture():
        tensor.add_(1)
        errors = [failure_of(lambda: group.allreduce([tensor])), failure_of(group.barrier)]
    graph.replay()
    torch.accelerator.synchronize()
    assert tensor[0].item() == 1.0 + whole_sum()
    return [error.text if error else "" for error in errors]


def device_after_a_copy() -> int:
    """The current device, 0 before, once a result was copied on device 1."""
    torch.accelerator.set_device_index(0)
    transposed = torch.ones(2, 3, device=f"{accelerator.NAME}:1").t()
    stager = _pg_lent.DeviceStager(0, 1, accelerator.NAME)
    stager.stage("allreduce", ([transposed],), {}).copy_out()
    return torch.accelerator.current_device_index()


def begin_alone(violations: str, address: str, faults: str) -> None:
    """A world of one, with these faults in its children."""
    prepare(violations)
    torch.accelerator.set_device_index(0)
    os.environ["TORCHFT_EXT_SIM_FAULTS"] = faults
    kept["group"] = pgs.ProcessGroupBabyNCCL(timeout=LIMIT)
    kept["group"].configure(address, 0, 1)
