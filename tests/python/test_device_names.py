"""What groups for device tensors are made by, and what is said where there is no device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_side import accelerator, check_sum, device, init
from fresh_process import run_cases
from rankside import backend, wait_until
from values import me


def init_and_sum(spec: str, address: str, rank: int, size: int, bound: bool = False) -> bool:
    init(spec, address, rank, size, bound)
    assert me() == (rank, size)
    check_sum()
    dist.barrier()
    return dist.group.WORLD._get_backend(device()).supports_coalescing


SPECS = (
    "ft",
    "FT",
    "ft:nccl",
    "ft_nccl",
    f"cpu:gloo,{accelerator.NAME}:ft_nccl",
    f"cpu:ft,{accelerator.NAME}:ft",
)


@pytest.mark.parametrize("bound", (False, True), ids=("lazy", "device_id"))
@pytest.mark.parametrize("spec", SPECS)
def test_spec_serves_device_tensors(devices, spec, bound):
    pool = devices.pool
    address, workers = pool.address(), pool.borrow(2)
    calls = [
        worker.call(init_and_sum, (spec, address, rank, 2, bound), {})
        for rank, worker in enumerate(workers)
    ]
    assert [call.value() for call in calls] == [True, True]


def sum_with_an_old_library(address: str) -> None:
    accelerator.prepare()
    accelerator.simulator().inject("version 22601")
    init_and_sum("ft:nccl", address, 0, 1)


@pytest.mark.skipif(not accelerator.simulated(), reason="the simulator's version can be chosen")
def test_library_whose_aborts_may_hang_is_warned_of(devices):
    (worker,) = devices.pool.borrow(1)
    worker.call(sum_with_an_old_library, (devices.pool.address(),), {}).value()
    wait_until(lambda: "use NCCL 2.26.2 or later" in worker.log(), "the warning")
    assert "NCCL 2.26.1 may hang in an abort" in worker.log()


def without_device(name: str) -> str:
    from test_names import init_alone

    if name == "ft":
        init_alone(name)
        dist.all_reduce(torch.ones(3))
        assert backend().stats()["engine"] == "host"
        return "CPU tensors are served"
    with pytest.raises(NotImplementedError) as caught:
        init_alone(name)
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has a CUDA device")
def test_without_a_device_nccl_says_why_and_ft_serves_the_cpu(rank_env):
    cases = run_cases("test_device_names", "without_device", ["ft", "ft:nccl", "ft_nccl"], rank_env)
    for name in ("ft:nccl", "ft_nccl"):
        assert "needs NCCL: " in cases[name] and "use 'ft:host'" in cases[name], cases[name]
