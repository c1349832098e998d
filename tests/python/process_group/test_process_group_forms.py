"""The ways in which torchft's page says that its process groups are made and called."""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from process_group_side import LIMIT, leave, own, parts, place, results_of, with_op, world_of
from rankside import kept, seconds
from torch._C._distributed_c10d import AllgatherOptions

from torchft_ext import process_group as pgs

NEEDED = inspect.Parameter.empty
MINUTE = 60.0
# What is called, and its arguments in their order, with their defaults.
SIGNATURES = {
    "ErrorSwallowingProcessGroupWrapper": {"pg": NEEDED},
    "ErrorSwallowingProcessGroupWrapper.error": {},
    "ErrorSwallowingProcessGroupWrapper.report_error": {"e": NEEDED},
    "ManagedProcessGroup": {"manager": NEEDED},
    "ManagedProcessGroup.size": {},
    "ProcessGroup.broadcast_one": {"tensor": NEEDED, "root": NEEDED},
    "ProcessGroup.getBackendName": {},
    "ProcessGroup.register": {"name": NEEDED},
    "ProcessGroup.size": {},
    "ProcessGroup.unregister": {},
    "ProcessGroupBaby": {"timeout": MINUTE},
    "ProcessGroupBabyGloo": {"timeout": MINUTE},
    "ProcessGroupBabyNCCL": {"timeout": MINUTE},
    "ProcessGroupDummy": {"rank": NEEDED, "world": NEEDED},
    "ProcessGroup.abort": {"errored": True},
    "ProcessGroupGloo": {"timeout": MINUTE, "pg": None},
    "ProcessGroupNCCL": {"pg": None},
    "ProcessGroupWrapper": {"pg": None},
    "create_store_client": {"store_addr": NEEDED},
    "extend_device_mesh": {"mesh": NEEDED, "pg": NEEDED, "name": "dp", "dim": 0},
}
OPERATIONS = {
    "ErrorSwallowingProcessGroupWrapper": {"allreduce"},
    "ManagedProcessGroup": {"allreduce"},
    "ProcessGroup": {"allgather", "allreduce", "broadcast"},
    "ProcessGroupBaby": {"allreduce"},
    "ProcessGroupDummy": {"allgather", "allreduce", "broadcast"},
    "ProcessGroupWrapper": {"allgather", "allreduce", "broadcast"},
}
BASES = {
    "ErrorSwallowingProcessGroupWrapper": pgs.ProcessGroupWrapper,
    "ManagedProcessGroup": pgs.ProcessGroupWrapper,
    "ProcessGroup": dist.ProcessGroup,
    "ProcessGroupBaby": pgs.ProcessGroup,
    "ProcessGroupBabyGloo": pgs.ProcessGroupBaby,
    "ProcessGroupBabyNCCL": pgs.ProcessGroupBaby,
    "ProcessGroupDummy": pgs.ProcessGroup,
    "ProcessGroupGloo": pgs.ProcessGroup,  # there a wrapper, whose parent is the gloo in use
    "ProcessGroupNCCL": pgs.ProcessGroup,
    "ProcessGroupWrapper": pgs.ProcessGroup,
}


def found(name: str) -> object:
    value: object = pgs
    for part in name.split("."):
        value = getattr(value, part)
    return value


def in_seconds(value: object) -> object:
    return value.total_seconds() if isinstance(value, timedelta) else value


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_torchfts_names_order_and_defaults(name):
    parameters = dict(inspect.signature(found(name)).parameters)
    parameters.pop("self", None)
    expected = SIGNATURES[name]
    assert list(parameters)[: len(expected)] == list(expected)
    for argument, default in expected.items():
        if default is not NEEDED:
            assert in_seconds(parameters.pop(argument).default) == default
        elif parameters.pop(argument).default is not NEEDED:
            assert name == "ProcessGroupDummy"  # whose arguments can be these alone
    assert NEEDED not in [one.default for one in parameters.values()]


def test_classes_have_torchfts_bases_and_operations():
    for name, base in BASES.items():
        assert issubclass(getattr(pgs, name), base)
    for name, operations in OPERATIONS.items():
        assert all(callable(getattr(getattr(pgs, name), one)) for one in operations)
    assert isinstance(pgs.ProcessGroupWrapper.parent, property)
    assert isinstance(pgs.ProcessGroup.group_name, property)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((0, 1), {}),
        ((dist.HashStore(), 0, 1), {}),
        ((), {"store": dist.HashStore(), "rank": 0, "size": 1}),
    ],
)
def test_base_is_made_as_torchs_is(args, kwargs):
    group = pgs.ProcessGroup(*args, **kwargs)
    assert (group.rank(), group.size()) == (0, 1)
    assert (pgs.ProcessGroup(1, 3).rank(), pgs.ProcessGroup(1, 3).size()) == (1, 3)
    for wrong in ((1,), (1, 2, 3), ("a", 1)):
        with pytest.raises(TypeError, match="expected a rank and a size"):
            pgs.ProcessGroup(*wrong)


def options(kind: type, root: int) -> object:
    made = kind()
    made.rootRank = root
    return made


def sums() -> list[torch.Tensor]:
    """torch's overloads by name, in another order than theirs, and for one tensor."""
    group, op, limit = kept["group"], dist.ReduceOp, seconds(LIMIT)
    tensors = [own(float(number)) for number in range(9)]
    group.allreduce(opts=with_op(dist.AllreduceOptions(), op.AVG), tensors=[tensors[0]]).wait()
    group.allreduce(op=op.MAX, tensors=[tensors[1]]).wait()
    group.allreduce(tensor=tensors[2], op=op.MIN, timeout=limit).wait()
    group.allreduce(tensors[3]).wait()
    group.allreduce(tensors[4], op.AVG, limit).wait()
    group.broadcast(opts=options(dist.BroadcastOptions, 1), tensors=[tensors[5]]).wait()
    group.broadcast(root=1, tensor=tensors[6]).wait()
    group.broadcast_one(root=1, tensor=tensors[7]).wait()
    group.reduce(op=op.MAX, root=1, tensor=tensors[8]).wait()
    return tensors if group.rank() == 1 else tensors[:8]


def gathers() -> list[torch.Tensor]:
    group, rank, size = kept["group"], kept["group"].rank(), kept["group"].size()
    lists = [[torch.zeros(4) for _ in range(size)] for _ in range(3)]
    flat = torch.zeros(4 * size)
    group.allgather(input_tensors=[own()], output_tensors=[lists[0]]).wait()
    group.allgather(input_tensor=own(1.0), output_tensors=lists[1]).wait()
    group.gather(root=1, input_tensor=own(2.0), output_tensors=lists[2] if rank == 1 else []).wait()
    group._allgather_base(opts=AllgatherOptions(), input=own(3.0), output=flat).wait()
    return [*lists[0], *lists[1], *lists[2], flat]


def scatters() -> list[torch.Tensor]:
    group, rank, size = kept["group"], kept["group"].rank(), kept["group"].size()
    share, summed = torch.zeros(1), torch.zeros(1)
    exchanged, swapped = torch.zeros(size), [torch.zeros(1) for _ in range(size)]
    group.scatter(root=1, input_tensors=parts() if rank == 1 else [], output_tensor=share).wait()
    average = dist.ReduceOp.AVG
    group.reduce_scatter(op=average, input=parts(), output=summed).wait()
    splits = {"input_split_sizes": [1] * size, "output_split_sizes": [1] * size}
    group.alltoall_base(input=torch.cat(parts()), output=exchanged, **splits).wait()
    group.alltoall(input_tensors=parts(), output_tensors=swapped).wait()
    return [share, summed, exchanged, *swapped]


def messages() -> list[torch.Tensor]:
    group, received = kept["group"], torch.zeros(4)
    if group.rank() == 0:
        group.send(tag=3, dstRank=1, tensors=[own()]).wait()
    else:
        group.recv(tag=3, srcRank=0, tensors=[received]).wait()
    group.barrier(opts=dist.BarrierOptions()).wait()
    return [received]


def wrap() -> None:
    kept["group"] = pgs.ProcessGroupWrapper(pg=kept["group"])


@pytest.mark.parametrize("kind", ["wrapped Host", "Gloo", "BabyHost", "BabyGloo"])
def test_every_overload_of_torchs_is_served_by_position_and_by_name(ranks, kind):
    results = []
    for chosen in ("Host", kind):
        world = world_of(ranks, 2, chosen.removeprefix("wrapped "))
        if chosen != chosen.removeprefix("wrapped "):
            world.run(wrap)
        found = [world.run(results_of, each) for each in (sums, gathers, scatters, messages)]
        results.append(found)
        world.run(leave)
    assert results[0] == results[1]


def gathered_single() -> list[list[float]]:
    """As torch has it since 2.14, where its own groups have it too."""
    group, size = kept["group"], kept["group"].size()
    at_root = group.rank() == 1
    outputs = [torch.zeros(4 * size), torch.zeros(size, 4)] if at_root else [torch.zeros(0)] * 2
    for output in outputs:
        group.gather_single(output, own(), options(dist.GatherOptions, 1)).wait()
    if at_root:
        with pytest.raises(ValueError, match="gather_single: output: expected 8 elements, found 3"):
            group.gather_single(torch.zeros(3), own(), options(dist.GatherOptions, 1))
    return [output.flatten().tolist() for output in outputs]


@pytest.mark.parametrize("kind", ["Gloo", "BabyHost"])
def test_gather_into_one_tensor_is_served_over_any_backend(ranks, kind):
    world = world_of(ranks, 2, kind)
    whole = [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
    assert world.run(gathered_single) == [[[], []], [whole, whole]]
    world.run(leave)


# ---- one rank, in this process ----


def test_wrapper_without_a_group_says_so(store):
    wrapper = pgs.ProcessGroupWrapper()
    assert (wrapper.rank(), wrapper.size(), wrapper.errored()) == (0, 1, None)
    with pytest.raises(RuntimeError, match="process group not initialized: call configure"):
        wrapper.allreduce([torch.ones(1)])
    with pytest.raises(NotImplementedError, match=r"give it one, or define _create_pg\(\)"):
        wrapper.configure(place(store), 0, 1)
    wrapper.abort()
    wrapper.shutdown()


class MakesGloo(pgs.ProcessGroupWrapper):
    """As torchft's own subclasses do."""

    def _create_pg(self, store, rank, world_size):
        group = dist.ProcessGroup(store, rank, world_size)
        gloo = dist.ProcessGroupGloo(store, rank, world_size, self._timeout)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        return group


@pytest.mark.parametrize("given", [(), (seconds(LIMIT),)])
def test_subclass_of_the_wrapper_makes_its_groups_itself(store, given):
    wrapper = MakesGloo(*given)
    parents = []
    for _ in range(2):
        wrapper.configure(place(store), 0, 1)
        tensor = torch.ones(1)
        wrapper.allreduce([tensor]).wait()
        parents.append(wrapper.parent)
        assert (wrapper.rank(), wrapper.size(), tensor.item()) == (0, 1, 1.0)
    assert parents[0] is not parents[1]
    wrapper.shutdown()


@pytest.mark.parametrize("form", ["pg", "pg=", "timeout, pg", "timeout=, pg="])
def test_wrapper_takes_a_group_in_torchfts_forms(form):
    group, limit = pgs.ProcessGroupDummy(0, 1), timedelta(seconds=3)
    forms = {"pg": (group,), "timeout, pg": (limit, group)}
    named = {"pg=": {"pg": group}, "timeout=, pg=": {"timeout": limit, "pg": group}}
    wrapper = pgs.ProcessGroupWrapper(*forms.get(form, ()), **named.get(form, {}))
    assert wrapper.parent is group
    wrapper.configure("address", 0, 1)
    assert group.configure_count == group.reconfigure_count == 1
    assert repr(wrapper) == "ProcessGroupWrapper(pg=ProcessGroupDummy())"


def test_nccl_group_is_made_of_a_timeout_or_of_another_group(store):
    other = pgs.ProcessGroupHost(timeout=LIMIT)
    group = pgs.ProcessGroupNCCL(pg=other)
    for _ in range(2):
        group.configure(place(store), 0, 1)
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        assert (other.size(), group.size(), group.errored(), tensor.item()) == (1, 1, None, 1.0)
        group.shutdown()
    assert pgs.ProcessGroupNCCL(timedelta(seconds=3))._timeout == timedelta(seconds=3)
    with pytest.raises(TypeError, match="found ProcessGroupDummy; ProcessGroupWrapper takes any"):
        pgs.ProcessGroupNCCL(pgs.ProcessGroupDummy())


def test_managed_group_takes_one_tensor_in_every_form():
    asked = []

    class Manager:
        _pg = pgs.ProcessGroupDummy()

        def allreduce(self, tensor, *, reduce_op):
            asked.append(reduce_op)
            return pgs.ProcessGroupDummy().allreduce([tensor])

        def num_participants(self):
            return 2

    group, op = pgs.ManagedProcessGroup(Manager()), dist.ReduceOp
    group.allreduce(torch.ones(1)).wait()
    group.allreduce(tensor=torch.ones(1), op=op.MAX).wait()
    group.allreduce(op=op.MIN, tensors=[torch.ones(1)]).wait()
    assert asked == [op.SUM, op.MAX, op.MIN]
    with pytest.raises(ValueError, match="expected one tensor, found 2"):
        group.allreduce([torch.ones(1), torch.ones(1)])
