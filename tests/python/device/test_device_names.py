"""What groups for device tensors are made by, and what is said where there is no device."""

from __future__ import annotations

import os

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


@pytest.mark.skipif(not accelerator.nccl_simulated(), reason="its version can be chosen")
def test_library_whose_aborts_may_hang_is_warned_of_on_the_simulator(devices):
    (worker,) = devices.pool.borrow(1)
    worker.call(sum_with_an_old_library, (devices.pool.address(),), {}).value()
    wait_until(lambda: "use NCCL 2.26.2 or later" in worker.log(), "the warning")
    assert "NCCL 2.26.1 may hang in an abort" in worker.log()


def blocking_communicators(address: str, rank: int) -> int:
    """How many of this process's communicators are: one of all ranks, one of these two."""
    init("ft:nccl", address, rank, 2)
    accelerator.simulator().reset()
    check_sum()
    if rank == 0:
        dist.send(torch.ones(3, device=device()), 1)
    else:
        dist.recv(torch.empty(3, device=device()), 0)
    backend().check()
    return int(accelerator.simulator().report()["counts"].get("blocking inits", 0))


@pytest.mark.skipif(not accelerator.nccl_simulated(), reason="the simulator counts them")
@pytest.mark.parametrize(
    ("devices", "made"), (("non_blocking", 0), ("blocking", 2)), indirect=["devices"]
)  # blocking: by default
def test_communicators_are_blocking_where_the_environment_says_so_on_the_simulator(devices, made):
    pool = devices.pool
    address = pool.address()
    calls = [
        worker.call(blocking_communicators, (address, rank), {})
        for rank, worker in enumerate(pool.borrow(2))
    ]
    assert [call.value() for call in calls] == [made, made]


def kinds_by_default(address: str) -> dict[str, int]:
    """How many communicators are blocking ones, where nobody has asked for any kind."""
    made = {}
    accelerator.prepare()
    for number, (variable, value, version) in enumerate(
        (
            ("", "", 22202),
            ("", "", 22203),
            ("", "", 23200),
            ("NCCL_LAUNCH_MODE", "GROUP", 22809),
        )
    ):
        accelerator.simulator().reset()
        accelerator.simulator().inject(f"version {version}")
        if variable:
            os.environ[variable] = value
        init("ft:nccl", f"{address}/{number}", 0, 1)
        os.environ.pop(variable, None)
        check_sum()
        counts = accelerator.simulator().report()["counts"]
        made[variable or str(version)] = int(counts.get("blocking inits", 0))
    accelerator.simulator().reset()
    return made


@pytest.mark.skipif(not accelerator.nccl_simulated(), reason="its version can be chosen")
def test_communicators_are_blocking_by_default_where_nothing_speaks_against_it_on_the_simulator(
    devices,
):
    (worker,) = devices.pool.borrow(1)
    assert worker.call(kinds_by_default, (devices.pool.address(),), {}).value() == {
        "22202": 0,
        "22203": 1,
        "23200": 0,
        "NCCL_LAUNCH_MODE": 0,
    }


def refused_environment(address: str) -> list[str]:
    refused = []
    os.environ["TORCHFT_EXT_NCCL_BLOCKING"] = "1"
    for variable, value in (
        ("TORCHFT_EXT_NCCL_BLOCKING", "yes"),
        ("NCCL_LAUNCH_MODE", "GROUP"),
        ("NCCL_ENQUEUE_REARCH_ENABLE", "1"),
    ):
        before = os.environ.get(variable)
        os.environ[variable] = value
        with pytest.raises(ValueError) as caught:
            init("ft:nccl", address, 0, 1)
        refused.append(str(caught.value))
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before
    del os.environ["TORCHFT_EXT_NCCL_BLOCKING"]
    return refused


def test_environment_that_goes_ill_with_blocking_communicators_is_refused(devices):
    (worker,) = devices.pool.borrow(1)
    texts = worker.call(refused_environment, (devices.pool.address(),), {}).value()
    assert "TORCHFT_EXT_NCCL_BLOCKING: expected '0' or '1', found 'yes'" in texts[0]
    assert "NCCL_LAUNCH_MODE=GROUP" in texts[1] and "unset it" in texts[1]
    assert "NCCL_ENQUEUE_REARCH_ENABLE=1" in texts[2] and "unset it" in texts[2]


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
