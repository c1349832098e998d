"""Operations on device tensors give what the CPU engine gives."""

from __future__ import annotations

import pytest
import test_collectives
import test_layouts
import torch
import torch.distributed as dist
import values
from device_side import accelerator, device, no_violation, ones
from rankside import backend, wait_until
from values import check, me, pattern, reduced_patterns

WORLDS = (1, 2, 3, 4)
TABLE = [operation.__name__ for operation in test_collectives.OPERATIONS]


def allowed_on_device(op: str, dtype: torch.dtype) -> bool:
    """NCCL has neither 16 bit integers nor bitwise reductions; flags are reduced as bytes."""
    if op in values.BITWISE and dtype != torch.bool:
        return False
    return values.allowed(op, dtype) and dtype != torch.int16


def run_table(name: str) -> None:
    """A function of the CPU's table, with every tensor made on the device."""
    test_collectives.allowed = allowed_on_device
    if accelerator.shared_by(me()[1]):  # a small operation takes milliseconds there
        test_collectives.SIZES, test_collectives.LARGE = (0, 1025), 131_101
    with torch.device(device()):
        getattr(test_collectives, name)()
    backend().check()
    no_violation()


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("name", TABLE)
def test_device_collective_gives_the_reference_result(devices, name, size):
    devices.world(size).run(run_table, name)


def run_layouts(name: str) -> None:
    rank, _ = me()
    with torch.device(device()):
        for shift in range(len(test_layouts.LAYOUTS)):
            getattr(test_layouts, name)(test_layouts.Layouts(rank, shift))
    backend().check()
    no_violation()


@pytest.mark.parametrize("name", ("reductions", "copies", "exchanges"))
def test_device_results_are_by_element_whatever_the_layouts(devices, name):
    devices.world(2).run(run_layouts, name)


CHAINS = [chain.name for chain in test_layouts.CHAINED if chain.name != "block"]


def run_chained(name: str) -> None:
    with torch.device(device()):
        if name == "inputs":
            test_layouts.inputs_in_turn()
        else:
            test_layouts.chained(name)
    backend().check()
    no_violation()


# NCCL leaves the order within a block open.
@pytest.mark.parametrize("name", [*CHAINS, "inputs"])
def test_device_tensor_of_any_layout_is_read_when_its_turn_has_come(devices, name):
    devices.world(3).run(run_chained, name)


def keep_works_of_strided_tensors() -> None:
    tensor = ones(1000, 1000).t()
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    before = accelerator.tensor_bytes()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(10)]
    for work in works:
        work.wait()
    torch.accelerator.synchronize()
    backend().check()
    wait_until(lambda: accelerator.tensor_bytes() <= before, "what the operations needed to go")
    del works
    no_violation()


def test_kept_works_keep_no_memory(devices):
    devices.world(2).run(keep_works_of_strided_tensors)


OTHERS = ("special_values", "many_in_flight", "futures_carry_results", "barrier_orders")


@pytest.mark.parametrize("name", OTHERS)
def test_device_operation_behaves_as_the_cpus(devices, name):
    devices.world(3).run(run_other, name)


def run_other(name: str) -> None:
    if name == "many_in_flight":
        return many_in_flight()
    run_table(name)


def many_in_flight() -> None:
    rank, world = me()
    tensors = [pattern(rank, 1 + 97 * n, torch.float32, salt=n).to(device()) for n in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    works[-1].check()
    assert works[-1].is_completed()
    for n, tensor in enumerate(tensors):
        expected = reduced_patterns("SUM", world, 1 + 97 * n, torch.float32, salt=n)
        check(tensor.cpu(), expected, n)
    no_violation()


def both_kinds() -> None:
    rank, world = me()
    host, other = torch.full((5,), rank + 1.0), ones(5, value=rank + 1)
    works = [dist.all_reduce(host, async_op=True), dist.all_reduce(other, async_op=True)]
    for work in works:
        work.wait()
    expected = torch.full((5,), world * (world + 1) / 2)
    check(host, expected, "host")
    check(other.cpu(), expected, "device")
    dist.barrier()  # on the device that the group has used
    no_violation()


def test_one_group_serves_host_and_device_tensors(devices):
    devices.world(2).run(both_kinds)
