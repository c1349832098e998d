"""Device tensors, and host tensors beside them, that a group refuses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import values
from device_side import accelerator, check_sum, device, ones
from rankside import backend
from values import me


def refused() -> dict[str, str]:
    def text(action) -> str:
        try:
            action()
        except (ValueError, TypeError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("it was not refused")

    group, world = dist.group.WORLD, me()[1]
    texts = {
        "int16": text(lambda: dist.all_reduce(torch.ones(3, dtype=torch.int16, device=device()))),
        "complex": text(
            lambda: dist.all_reduce(ones(3).to(torch.complex64), dist.ReduceOp.PRODUCT)
        ),
        "band": text(lambda: dist.all_reduce(ones(3), dist.ReduceOp.BAND)),
        "mixed": text(lambda: group.allgather([[torch.ones(3)] * world], [ones(3)]).wait()),
        "expanded": text(lambda: dist.all_reduce(ones(4, 1).expand(4, 4))),
        "anyone": text(lambda: backend().recv_anysource([ones(3)], 0)),
    }
    assert backend().errored() is None
    check_sum()
    return texts


def test_bad_device_arguments_are_refused_and_the_generation_goes_on(devices):
    for texts in devices.world(2).run(refused):
        assert "int16" in texts["int16"] or "Short" in texts["int16"]
        assert "memory for each element" in texts["expanded"]
        assert "found" in texts["band"] and "one device" in texts["mixed"]
        assert "NotImplementedError" in texts["anyone"] and "source rank" in texts["anyone"]


def refuse_host_tensors() -> str:
    with pytest.raises(NotImplementedError) as caught:
        backend().allreduce([torch.ones(3)])
    check_sum()
    dist.barrier()
    return str(caught.value)


def test_group_for_device_tensors_refuses_the_cpus(devices):
    for text in devices.world(2, name="ft:nccl").run(refuse_host_tensors):
        assert "'ft'" in text and "CPU" in text


def refuse_device_tensors() -> str:
    with pytest.raises(NotImplementedError) as caught:
        backend().allreduce([ones(3)])
    assert backend().errored() is None
    values.check_sum()
    return str(caught.value)


def test_group_for_host_tensors_refuses_the_devices_and_says_what_serves_both(devices):
    for text in devices.world(2, name="ft:host").run(refuse_device_tensors):
        assert "allreduce: tensors: this group serves CPU tensors only" in text, text
        assert f"found tensors on {accelerator.NAME}:" in text, text
        assert "use the backend 'ft', which serves both" in text, text
