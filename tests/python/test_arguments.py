"""Bad input is refused before anything is sent, and the epoch is unharmed."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from rankside import backend, errored, seconds
from values import check_sum

REFUSED = (ValueError, TypeError)


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


def on_gather(outputs: object, inputs: object, root: int = 0) -> object:
    return group().gather(outputs, inputs, rooted(dist.GatherOptions, root))


# Every call is made in all ranks of a world of two; none may reach the network.
COLLECTIVES = {
    "bitwise_reduction_of_floats": lambda: all_reduce([ones(3)], dist.ReduceOp.BAND),
    "average_of_bools": lambda: all_reduce([ones(3, dtype=torch.bool)], dist.ReduceOp.AVG),
    "no_tensor": lambda: all_reduce([]),
    "two_tensors": lambda: all_reduce([ones(3), ones(3)]),
    "sparse_tensor": lambda: all_reduce([ones(3).to_sparse()]),
    "broadcast_root_too_big": lambda: group().broadcast(
        [ones(3)], rooted(dist.BroadcastOptions, 2)
    ),
    "broadcast_root_negative": lambda: group().broadcast(
        [ones(3)], rooted(dist.BroadcastOptions, -1)
    ),
    "reduce_root_too_big": lambda: group().reduce([ones(3)], rooted(dist.ReduceOptions, 5)),
    "allgather_into_too_few": lambda: group().allgather([[ones(3)]], [ones(3)]),
    "allgather_into_another_dtype": lambda: group().allgather(
        [[ones(3, dtype=torch.int32)] * 2], [ones(3)]
    ),
    "allgather_into_another_size": lambda: group().allgather([[ones(4), ones(4)]], [ones(3)]),
    "allgather_base_of_wrong_size": lambda: group()._allgather_base(ones(5), ones(3)),
    "allgather_base_of_wrong_dtype": lambda: group()._allgather_base(
        ones(6, dtype=torch.float64), ones(3)
    ),
    "gather_root_too_big": lambda: on_gather([[ones(3), ones(3)]], [ones(3)], root=2),
    "scatter_root_too_big": lambda: group().scatter(
        [ones(3)], [[ones(3), ones(3)]], rooted(dist.ScatterOptions, 7)
    ),
    "reduce_scatter_of_too_few": lambda: group().reduce_scatter([ones(3)], [[ones(3)]]),
    "reduce_scatter_into_another_size": lambda: group().reduce_scatter(
        [ones(4)], [[ones(3), ones(3)]]
    ),
    "premultiplied_sum": lambda: all_reduce([ones(3)], dist._make_nccl_premul_sum(0.5)),
    "reduce_scatter_base_of_wrong_size": lambda: group()._reduce_scatter_base(ones(3), ones(7)),
    "alltoall_of_too_few": lambda: group().alltoall([ones(3)], [ones(3)]),
    "alltoall_base_with_wrong_splits": lambda: group().alltoall_base(
        ones(4), ones(4), [1, 2], [2, 2]
    ),
    "alltoall_base_not_divisible": lambda: group().alltoall_base(ones(5), ones(5), [], []),
    "send_to_nobody": lambda: group().send([ones(3)], 2, 0),
    "send_to_oneself": lambda: group().send([ones(3)], group().rank(), 0),
    "negative_tag": lambda: group().send([ones(3)], 1 - group().rank(), -1),
    "recv_from_nobody": lambda: group().recv([ones(3)], -3, 0),
    "send_of_two_tensors": lambda: group().send([ones(3), ones(3)], 1 - group().rank(), 0),
    "tensor_on_meta": lambda: backend().allreduce([torch.ones(3, device="meta")]),
}


def refuse(case: str) -> str:
    try:
        COLLECTIVES[case]()
    except REFUSED as error:
        assert backend().errored() is None
        return str(error)
    except NotImplementedError as error:  # torch's dispatcher knows no such kernel
        return str(error)
    raise AssertionError("it was not refused")


@pytest.mark.parametrize("case", COLLECTIVES)
def test_collective_with_bad_arguments_is_refused_at_issue(ranks, case):
    world = ranks.world(2)
    for text in world.run(refuse, case):
        assert len(text) > 10  # it says something
    world.run(check_sum)
    assert world.run(errored) == [None, None]


ADDRESSES = (
    "",
    "nonsense",
    "127.0.0.1",
    "127.0.0.1:0/x",
    "127.0.0.1:99999/x",
    ":29500/x",
    "[::1/x",
)
MEMBERSHIPS = ((2, 2), (-1, 2), (0, 0), (0, -1), (1, 1))


def refuse_configure(address: object, rank: object, size: object) -> str:
    before = backend().epoch
    with pytest.raises(REFUSED) as caught:
        backend().configure(address, rank, size, timeout=seconds(5))
    assert backend().epoch == before and backend().errored() is None
    return str(caught.value)


def test_malformed_store_addresses_are_refused_and_the_epoch_goes_on(ranks):
    world = ranks.world(2)
    for address in ADDRESSES:
        assert repr(address).strip("'") in world.on(0, refuse_configure, address, 0, 2)
    world.on(0, refuse_configure, None, 0, 2)
    world.on(0, refuse_configure, 29500, 0, 2)
    world.run(check_sum)


def test_impossible_memberships_are_refused_and_the_epoch_goes_on(ranks):
    world = ranks.world(2)
    for rank, size in MEMBERSHIPS:
        text = world.on(0, refuse_configure, ranks.address(), rank, size)
        assert str(rank) in text or str(size) in text
    world.on(0, refuse_configure, ranks.address(), "0", 2)
    world.on(0, refuse_configure, ranks.address(), 0, 1.5)
    world.run(check_sum)


def refuse_timeouts() -> None:
    for bad in (5, "5", None):
        with pytest.raises(TypeError):
            backend().set_timeout(bad)
    for bad in (seconds(0), seconds(-1)):
        with pytest.raises(ValueError):
            backend().set_timeout(bad)
    with pytest.raises(TypeError, match=r"set_timeout: timeout: .*datetime\.timedelta.* float"):
        backend().set_timeout(1.5)
    with pytest.raises(TypeError):
        backend().configure("127.0.0.1:1/x", 0, 1, timeout=5)
    with pytest.raises(ValueError):
        backend().configure("127.0.0.1:1/x", 0, 1, timeout=seconds(-1))


def test_timeouts_must_be_positive_timedeltas(ranks):
    world = ranks.world(2)
    world.run(refuse_timeouts)
    world.run(check_sum)


def refuse_what_is_no_group() -> None:
    import torchft_ext

    with pytest.raises(TypeError, match="expected a process group or None, found str"):
        torchft_ext.backend("text")


def test_backend_of_something_else_than_a_group_is_refused(ranks):
    ranks.world(1).run(refuse_what_is_no_group)


def refuse_options() -> None:
    import torchft_ext

    for name, bad in (
        ("timeout", 5),
        ("heartbeat", 5),
        ("interface", 7),
        ("port_range", 7000),
    ):
        with pytest.raises(TypeError):
            torchft_ext.Options(**{name: bad})
    with pytest.raises(TypeError):
        torchft_ext.Options(datetime.timedelta(seconds=5))  # keyword-only
    with pytest.raises(TypeError):
        torchft_ext.Options(colour="red")


def test_options_of_wrong_types_are_refused(ranks):
    ranks.world(1).run(refuse_options)


def bad_option_values() -> list[str]:
    import torchft_ext

    texts = []
    for options in (
        {"port_range": "9000-8000"},
        {"port_range": "port"},
        {"interface": "nonexistent9"},
        {"heartbeat": seconds(-1)},
        {"timeout": seconds(-1)},
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            chosen = torchft_ext.Options(**options)
            dist.new_group(backend="ft", pg_options=chosen)
        texts.append(str(caught.value))
    return texts


def test_options_with_bad_values_are_refused_by_name(ranks):
    world = ranks.fresh(1)
    texts = world.on(0, bad_option_values)
    assert "9000-8000" in texts[0] and "port" in texts[1] and "nonexistent9" in texts[2]


def refuse_foreign_groups() -> str:
    import torchft_ext

    with pytest.raises(REFUSED) as caught:
        torchft_ext.backend(dist.new_group(backend="gloo"))
    return str(caught.value)


def test_backend_of_a_group_that_is_not_ft_is_refused(ranks):
    assert "gloo" in ranks.fresh(1).on(0, refuse_foreign_groups)


def no_group() -> str:
    from rankside import leave_default_group

    import torchft_ext

    leave_default_group()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        torchft_ext.backend()
    return str(caught.value)


def test_backend_without_a_default_group_says_so(ranks):
    assert "group" in ranks.world(1).on(0, no_group)
