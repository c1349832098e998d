"""Groups of torchft_ext.process_group have the name that register() gave, before configure() too.

torchft's own test of functional collectives, over every class of this package's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rankside import leave_default_group
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group

from torchft_ext import process_group as pgs

TIMEOUT = 20.0


class OwnWrapper(pgs.ProcessGroupWrapper):
    """One whose configure() makes its parent."""

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        return pgs.ProcessGroupDummy()


def managed() -> pgs.ProcessGroup:
    """A group of a Manager that has Host."""
    group = pgs.ProcessGroupHost(timeout=TIMEOUT)
    manager = SimpleNamespace(
        _pg=group,
        allreduce=lambda tensor, reduce_op: group.allreduce([tensor]),
        num_participants=lambda: 1,
        errored=lambda: None,
        report_error=pytest.fail,
    )
    return pgs.ManagedProcessGroup(manager)


CLASSES: dict[str, Callable[[], pgs.ProcessGroup]] = {
    "Host": lambda: pgs.ProcessGroupHost(timeout=TIMEOUT),
    "Gloo": lambda: pgs.ProcessGroupGloo(timeout=TIMEOUT),
    "Backend": lambda: pgs.ProcessGroupBackend("gloo", timeout=TIMEOUT),
    "BabyHost": lambda: pgs.ProcessGroupBabyHost(timeout=TIMEOUT),
    "BabyGloo": lambda: pgs.ProcessGroupBabyGloo(timeout=TIMEOUT),
    "NCCL over Host": lambda: pgs.ProcessGroupNCCL(pgs.ProcessGroupHost(timeout=TIMEOUT)),
    "Dummy": pgs.ProcessGroupDummy,
    "Wrapper": lambda: pgs.ProcessGroupWrapper(pgs.ProcessGroupHost(timeout=TIMEOUT)),
    "own Wrapper": OwnWrapper,
    "ErrorSwallowing": lambda: pgs.ErrorSwallowingProcessGroupWrapper(
        pgs.ProcessGroupHost(timeout=TIMEOUT)
    ),
    "Managed": managed,
}
# Bases of others; and one for devices, which test_process_group_baby_nccl.py looks at.
NOT_HERE = {"ProcessGroup", "ProcessGroupBaby", "ProcessGroupBabyNCCL"}


@pytest.fixture
def address() -> Iterator[str]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    leave_default_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield f"127.0.0.1:{store.port}"
    leave_default_group()


def test_every_class_is_looked_at():
    made = {type(make()).__name__ for make in CLASSES.values()} - {"OwnWrapper"}
    classes = {name for name in pgs.__all__ if name.startswith(("Process", "Error", "Managed"))}
    assert made | NOT_HERE == classes


def check(group: pgs.ProcessGroup, name: str) -> None:
    assert group.group_name == name
    assert _resolve_process_group(name) is group
    assert wait_tensor(all_reduce(torch.ones(3), "sum", group)).tolist() == [1.0] * 3
    assert wait_tensor(all_reduce(torch.ones(3), "sum", name)).tolist() == [1.0] * 3


@pytest.mark.parametrize("kind", CLASSES)
def test_group_registered_before_configure_serves_functional_collectives(address, kind):
    group = CLASSES[kind]().register(f"early {kind}")
    assert group.group_name == f"early {kind}"
    for generation in (1, 2):
        group.configure(f"{address}/{kind}{generation}", 0, 1)
        check(group, f"early {kind}")
    group.unregister()
    group.shutdown()


def test_group_without_a_name_says_so(address):
    group = pgs.ProcessGroupHost(timeout=TIMEOUT)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ProcessGroup name not set"):
            group.group_name  # noqa: B018
        group.configure(f"{address}/nameless", 0, 1)
    group.shutdown()


def test_groups_that_share_a_backend_have_names_of_their_own(address):
    first = pgs.ProcessGroupHost(timeout=TIMEOUT).register("first of two")
    second = pgs.ProcessGroupNCCL(first).register("second of two")
    second.configure(f"{address}/shared", 0, 1)
    check(first, "first of two")
    check(second, "second of two")
    for group in (first, second):
        group.unregister()
    first.shutdown()


@pytest.mark.parametrize("kind", ["Host", "Gloo", "Dummy"])
def test_mesh_takes_a_group_that_was_registered_before_configure(address, kind):
    inner = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    group = CLASSES[kind]().register(f"mesh {kind}")
    mesh: DeviceMesh = pgs.extend_device_mesh(inner, group, name="replica")
    group.configure(f"{address}/mesh{kind}", 0, 1)
    check(mesh["replica"].get_group(), f"mesh {kind}")
    group.unregister()
    group.shutdown()
