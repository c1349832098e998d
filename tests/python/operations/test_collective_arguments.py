"""Collectives and messages with bad arguments are refused at issue, and the generation is
unharmed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rankside import backend, errored, failure_of
from values import check_sum


def group() -> dist.ProcessGroup:
    return dist.group.WORLD


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def all_reduce(tensors: object, op: dist.ReduceOp = dist.ReduceOp.SUM) -> object:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return group().allreduce(tensors, options)


def rooted(kind: type, root: int) -> object:
    options = kind()
    options.rootRank = root
    return options


def me() -> int:
    return group().rank()


def all_reduce_coalesced(tensors: object, op: dist.ReduceOp = dist.ReduceOp.SUM) -> object:
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = op
    return group().allreduce_coalesced(tensors, options)


def on_gather(outputs: object, inputs: object, root: int = 0) -> object:
    return group().gather(outputs, inputs, rooted(dist.GatherOptions, root))


def on_scatter(outputs: object, inputs: object, root: int = 0) -> object:
    return group().scatter(outputs, inputs, rooted(dist.ScatterOptions, root))


def ints(*shape: int) -> torch.Tensor:
    return ones(*shape, dtype=torch.int32)


# Every call is made in all ranks of a world of two; none may reach the network. With each, the
# exception's exact type and text: operation, argument, expected, found.
COLLECTIVES = {
    "bitwise_reduction_of_floats": (
        lambda: all_reduce([ones(3)], dist.ReduceOp.BAND),
        TypeError,
        "allreduce: tensors[0]: ReduceOp band: expected integers or bool, found Float",
    ),
    "average_of_bools": (
        lambda: all_reduce([ones(3, dtype=torch.bool)], dist.ReduceOp.AVG),
        TypeError,
        "allreduce: tensors[0]: ReduceOp.AVG: expected a number type, found bool",
    ),
    "no_tensor": (
        lambda: backend().allreduce([]),
        ValueError,
        "allreduce: tensors: expected a list of 1 tensor, found 0",
    ),
    "two_tensors": (
        lambda: all_reduce([ones(3), ones(3)]),
        ValueError,
        "allreduce: tensors: expected a list of 1 tensor, found 2",
    ),
    "sparse_tensor": (
        lambda: backend().allgather([[ones(3), ones(3)]], [ones(3).to_sparse()]),
        ValueError,
        "allgather: inputs[0]: expected a dense tensor, found layout Sparse",
    ),
    "broadcast_root_too_big": (
        lambda: group().broadcast([ones(3)], rooted(dist.BroadcastOptions, 2)),
        ValueError,
        "broadcast: root rank: expected a rank from 0 to 1, found 2",
    ),
    "broadcast_root_negative": (
        lambda: group().broadcast([ones(3)], rooted(dist.BroadcastOptions, -1)),
        ValueError,
        "broadcast: root rank: expected a rank from 0 to 1, found -1",
    ),
    "reduce_root_too_big": (
        lambda: group().reduce([ones(3)], rooted(dist.ReduceOptions, 5)),
        ValueError,
        "reduce: root rank: expected a rank from 0 to 1, found 5",
    ),
    "allgather_into_too_few": (
        lambda: group().allgather([[ones(3)]], [ones(3)]),
        ValueError,
        "allgather: outputs[0]: expected a list of 2 tensors, found 1",
    ),
    "allgather_into_another_dtype": (
        lambda: group().allgather([[ones(3, dtype=torch.int32)] * 2], [ones(3)]),
        TypeError,
        "allgather: outputs[0][0]: expected dtype Float as inputs[0] has, found Int",
    ),
    "allgather_into_another_size": (
        lambda: group().allgather([[ones(4), ones(4)]], [ones(3)]),
        ValueError,
        "allgather: outputs[0][{me}]: expected 3 elements (as this rank's input has), found 4",
    ),
    "allgather_base_of_wrong_size": (
        lambda: group()._allgather_base(ones(5), ones(3)),
        ValueError,
        "_allgather_base: output: expected 6 elements (world size times the input's), found 5",
    ),
    "allgather_base_of_wrong_dtype": (
        lambda: group()._allgather_base(ones(6, dtype=torch.float64), ones(3)),
        TypeError,
        "_allgather_base: output: expected dtype Float as input has, found Double",
    ),
    "gather_root_too_big": (
        lambda: on_gather([[ones(3), ones(3)]], [ones(3)], root=2),
        ValueError,
        "gather: root rank: expected a rank from 0 to 1, found 2",
    ),
    "gather_into_too_few": (
        lambda: on_gather([[ones(3)]], [ones(3)], root=me()),
        ValueError,
        "gather: outputs[0]: expected a list of 2 tensors, found 1",
    ),
    "gather_of_two_tensors": (
        lambda: on_gather([[ones(3)] * 2], [ones(3), ones(3)], root=me()),
        ValueError,
        "gather: inputs: expected a list of 1 tensor, found 2",
    ),
    "gather_into_another_dtype": (
        lambda: on_gather([[ints(3), ints(3)]], [ones(3)], root=me()),
        TypeError,
        "gather: outputs[0][0]: expected dtype Float as inputs[0] has, found Int",
    ),
    "gather_into_several_dtypes": (
        lambda: on_gather([[ones(3), ints(3)]], [ones(3)], root=me()),
        TypeError,
        "gather: outputs[0][1]: expected dtype Float as outputs[0][0] has, found Int",
    ),
    "gather_into_another_size": (
        lambda: on_gather([[ones(3), ones(4)]], [ones(3)], root=me()),
        ValueError,
        "gather: outputs[0][1]: expected 3 elements (as the input has), found 4",
    ),
    "gather_with_outputs_elsewhere": (
        lambda: on_gather([[ones(3)] * 2], [ones(3)], root=1 - me()),
        ValueError,
        "gather: outputs: expected an empty list on ranks other than the root, found 1 lists",
    ),
    "scatter_root_too_big": (
        lambda: on_scatter([ones(3)], [[ones(3)] * 2], root=7),
        ValueError,
        "scatter: root rank: expected a rank from 0 to 1, found 7",
    ),
    "scatter_of_too_few": (
        lambda: on_scatter([ones(3)], [[ones(3)]], root=me()),
        ValueError,
        "scatter: inputs[0]: expected a list of 2 tensors, found 1",
    ),
    "scatter_into_two_tensors": (
        lambda: on_scatter([ones(3), ones(3)], [[ones(3)] * 2], root=me()),
        ValueError,
        "scatter: outputs: expected a list of 1 tensor, found 2",
    ),
    "scatter_of_another_dtype": (
        lambda: on_scatter([ones(3)], [[ones(3), ints(3)]], root=me()),
        TypeError,
        "scatter: inputs[0][1]: expected dtype Float as outputs[0] has, found Int",
    ),
    "scatter_of_another_size": (
        lambda: on_scatter([ones(3)], [[ones(3), ones(4)]], root=me()),
        ValueError,
        "scatter: inputs[0][1]: expected 3 elements (as the output has), found 4",
    ),
    "scatter_with_inputs_elsewhere": (
        lambda: on_scatter([ones(3)], [[ones(3)] * 2], root=1 - me()),
        ValueError,
        "scatter: inputs: expected an empty list on ranks other than the root, found 1 lists",
    ),
    "reduce_scatter_of_too_few": (
        lambda: group().reduce_scatter([ones(3)], [[ones(3)]]),
        ValueError,
        "reduce_scatter: inputs[0]: expected a list of 2 tensors, found 1",
    ),
    "reduce_scatter_into_another_size": (
        lambda: group().reduce_scatter([ones(4)], [[ones(3), ones(3)]]),
        ValueError,
        "reduce_scatter: inputs[0][{me}]: expected 4 elements (as the output has), found 3",
    ),
    "reduce_scatter_into_two_tensors": (
        lambda: group().reduce_scatter([ones(3), ones(3)], [[ones(3)] * 2]),
        ValueError,
        "reduce_scatter: outputs: expected a list of 1 tensor, found 2",
    ),
    "reduce_scatter_of_another_dtype": (
        lambda: group().reduce_scatter([ones(3)], [[ones(3), ints(3)]]),
        TypeError,
        "reduce_scatter: inputs[0][1]: expected dtype Float as outputs[0] has, found Int",
    ),
    "premultiplied_sum_of_integers": (
        lambda: all_reduce([ones(3, dtype=torch.int32)], dist._make_nccl_premul_sum(0.5)),
        TypeError,
        "allreduce: tensors[0]: ReduceOp.PREMUL_SUM: expected float, double, half or bfloat16 "
        "(or complex numbers of these), found Int",
    ),
    "premultiplied_sum_by_a_complex_number": (
        lambda: all_reduce([ones(3)], dist._make_nccl_premul_sum(torch.tensor(1j))),
        TypeError,
        "allreduce: op: factor: expected a real number, found dtype ComplexFloat",
    ),
    "reduce_scatter_base_of_wrong_size": (
        lambda: group()._reduce_scatter_base(ones(3), ones(7)),
        ValueError,
        "_reduce_scatter_base: input: expected 6 elements (world size times the output's), found 7",
    ),
    "reduce_scatter_base_of_another_dtype": (
        lambda: group()._reduce_scatter_base(ones(3), ints(6)),
        TypeError,
        "_reduce_scatter_base: input: expected dtype Float as output has, found Int",
    ),
    "alltoall_of_too_few": (
        lambda: group().alltoall([ones(3)], [ones(3)]),
        ValueError,
        "alltoall: outputs: expected a list of 2 tensors, found 1",
    ),
    "alltoall_of_too_few_inputs": (
        lambda: group().alltoall([ones(3), ones(3)], [ones(3)]),
        ValueError,
        "alltoall: inputs: expected a list of 2 tensors, found 1",
    ),
    "alltoall_of_another_dtype": (
        lambda: group().alltoall([ones(3), ones(3)], [ones(3), ints(3)]),
        TypeError,
        "alltoall: inputs[1]: expected dtype Float as outputs[0] has, found Int",
    ),
    "alltoall_to_oneself_of_another_size": (
        lambda: group().alltoall([ones(3), ones(3)], [ones(4), ones(4)]),
        ValueError,
        "alltoall: outputs[{me}]: expected 4 elements (as this rank's input for itself has), "
        "found 3",
    ),
    "alltoall_base_with_wrong_splits": (
        lambda: group().alltoall_base(ones(4), ones(4), [1, 2], [2, 2]),
        ValueError,
        "alltoall_base: output: expected split sizes that add up to 4 (dimension 0), found 1 2",
    ),
    "alltoall_base_not_divisible": (
        lambda: group().alltoall_base(ones(5), ones(5), [], []),
        ValueError,
        "alltoall_base: input: expected dimension 0 to be a multiple of the world size 2 "
        "(no split sizes were given), found 5",
    ),
    "alltoall_base_with_wrong_input_splits": (
        lambda: group().alltoall_base(ones(4), ones(4), [2, 2], [1, 2]),
        ValueError,
        "alltoall_base: input: expected split sizes that add up to 4 (dimension 0), found 1 2",
    ),
    "alltoall_base_with_a_negative_split": (
        lambda: group().alltoall_base(ones(4), ones(4), [2, 2], [5, -1]),
        ValueError,
        "alltoall_base: input: expected split sizes of at least 0 that add up to 4 (dimension 0), "
        "found 5 -1",
    ),
    "alltoall_base_with_too_many_splits": (
        lambda: group().alltoall_base(ones(4), ones(4), [1, 1, 2], [2, 2]),
        ValueError,
        "alltoall_base: output: expected 2 split sizes, found 3",
    ),
    "alltoall_base_to_oneself_of_another_size": (
        lambda: group().alltoall_base(
            ones(4), ones(4), [3 - 2 * me(), 1 + 2 * me()], [1 + 2 * me(), 3 - 2 * me()]
        ),
        ValueError,
        "alltoall_base: output: expected room for 4 bytes from this rank itself, as its input "
        "split has, found 12",
    ),
    "alltoall_base_of_another_dtype": (
        lambda: group().alltoall_base(ones(4), ints(4), [], []),
        TypeError,
        "alltoall_base: output: expected dtype Int as input has, found Float",
    ),
    "alltoall_base_of_a_scalar": (
        lambda: group().alltoall_base(torch.tensor(1.0), torch.tensor(1.0), [], []),
        ValueError,
        "alltoall_base: input: expected at least one dimension, found none",
    ),
    "allreduce_coalesced_of_none": (
        lambda: backend().allreduce_coalesced([]),
        ValueError,
        "allreduce_coalesced: tensors: expected at least one tensor, found none",
    ),
    "allreduce_coalesced_of_bits_of_floats": (
        lambda: all_reduce_coalesced([ints(3), ones(3)], dist.ReduceOp.BAND),
        TypeError,
        "allreduce_coalesced: tensors[1]: ReduceOp band: expected integers or bool, found Float",
    ),
    "allreduce_coalesced_of_an_expanded_tensor": (
        lambda: all_reduce_coalesced([ones(3), ones(4, 1).expand(4, 2)]),
        ValueError,
        "allreduce_coalesced: tensors[1]: expected memory for each element, since the result is "
        "written to it, found strides [1, 0] for sizes [4, 2]",
    ),
    "allgather_coalesced_of_none": (
        lambda: backend().allgather_coalesced([[], []], []),
        ValueError,
        "allgather_coalesced: inputs: expected at least one tensor, found none",
    ),
    "allgather_coalesced_into_too_few_lists": (
        lambda: group().allgather_coalesced([[ones(3)]], [ones(3)]),
        ValueError,
        "allgather_coalesced: outputs: expected 2 lists (one for each rank), found 1",
    ),
    "allgather_coalesced_into_a_list_too_short": (
        lambda: group().allgather_coalesced([[ones(3), ones(3)], [ones(3)]], [ones(3), ones(3)]),
        ValueError,
        "allgather_coalesced: outputs[1]: expected a list of 2 tensors, found 1",
    ),
    "allgather_coalesced_into_another_dtype": (
        lambda: group().allgather_coalesced([[ints(3)], [ints(3)]], [ones(3)]),
        TypeError,
        "allgather_coalesced: outputs[0]: expected dtype Float as inputs[0] has, found Int",
    ),
    "allgather_coalesced_into_another_size": (
        lambda: group().allgather_coalesced([[ones(4)], [ones(4)]], [ones(3)]),
        ValueError,
        "allgather_coalesced: outputs[{me}]: expected 3 elements (as this rank's input has), "
        "found 4",
    ),
    "allgather_into_tensor_coalesced_of_another_number": (
        lambda: group().allgather_into_tensor_coalesced([ones(6), ones(6)], [ones(3)]),
        ValueError,
        "allgather_into_tensor_coalesced: outputs: expected a list of 1 tensor, found 2",
    ),
    "allgather_into_tensor_coalesced_into_another_size": (
        lambda: group().allgather_into_tensor_coalesced([ones(6), ones(5)], [ones(3), ones(3)]),
        ValueError,
        "allgather_into_tensor_coalesced: outputs[1]: expected 6 elements (world size times the "
        "input's), found 5",
    ),
    "reduce_scatter_tensor_coalesced_of_another_number": (
        lambda: group().reduce_scatter_tensor_coalesced([ones(3), ones(3)], [ones(6)]),
        ValueError,
        "reduce_scatter_tensor_coalesced: outputs: expected a list of 1 tensor, found 2",
    ),
    "reduce_scatter_tensor_coalesced_of_another_size": (
        lambda: group().reduce_scatter_tensor_coalesced([ones(3), ones(3)], [ones(6), ones(7)]),
        ValueError,
        "reduce_scatter_tensor_coalesced: inputs[1]: expected 6 elements (world size times the "
        "output's), found 7",
    ),
    "send_to_nobody": (
        lambda: group().send([ones(3)], 2, 0),
        ValueError,
        "send: destination rank: expected a rank from 0 to 1, found 2",
    ),
    "send_to_oneself": (
        lambda: group().send([ones(3)], me(), 0),
        ValueError,
        "send: destination rank: expected another rank, found this one, {me}",
    ),
    "negative_tag": (
        lambda: group().send([ones(3)], 1 - me(), -1),
        ValueError,
        "send: tag: expected at least 0, found -1",
    ),
    "recv_from_nobody": (
        lambda: group().recv([ones(3)], -3, 0),
        ValueError,
        "recv: source rank: expected a rank from 0 to 1, found -3",
    ),
    "recv_from_oneself": (
        lambda: group().recv([ones(3)], me(), 0),
        ValueError,
        "recv: source rank: expected another rank, found this one, {me}",
    ),
    "recv_into_overlapping_tensor": (
        lambda: group().recv([ones(6).unfold(0, 3, 1)], 1 - me(), 0),
        ValueError,
        "recv: tensors[0]: expected memory for each element, since the result is written to it, "
        "found strides [1, 1] for sizes [4, 3]",
    ),
    "recv_into_expanded_tensor": (
        lambda: group().recv([ones(4, 1).expand(4, 2)], 1 - me(), 0),
        ValueError,
        "recv: tensors[0]: expected memory for each element, since the result is written to it, "
        "found strides [1, 0] for sizes [4, 2]",
    ),
    "send_of_two_tensors": (
        lambda: group().send([ones(3), ones(3)], 1 - me(), 0),
        ValueError,
        "send: tensors: expected a list of 1 tensor, found 2",
    ),
    "tensor_on_meta": (
        lambda: backend().allreduce([torch.ones(3, device="meta")]),
        ValueError,
        "allreduce: tensors[0]: expected a tensor on the CPU or an accelerator, found one on meta",
    ),
}


def refusal_of(case: str) -> tuple[str, str]:
    error = failure_of(COLLECTIVES[case][0])
    assert error is not None, "it was not refused"
    assert backend().errored() is None
    return error.type, error.text


@pytest.mark.parametrize("case", COLLECTIVES)
def test_collective_with_bad_arguments_is_refused_at_issue(ranks, case):
    _, kind, text = COLLECTIVES[case]
    world = ranks.world(2)
    for rank, (found_kind, found_text) in enumerate(world.run(refusal_of, case)):
        assert found_kind == kind.__name__
        assert found_text == text.replace("{me}", str(rank))
    world.run(check_sum)
    assert world.run(errored) == [None, None]


def refuse_the_empty_list() -> None:
    with pytest.raises(NotImplementedError, match="c10d::allreduce_"):
        all_reduce([])
    assert backend().errored() is None


def test_torch_itself_refuses_a_list_without_tensors(ranks):
    world = ranks.world(2)
    world.run(refuse_the_empty_list)
    world.run(check_sum)
