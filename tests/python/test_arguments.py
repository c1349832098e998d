"""Bad input is refused before anything is sent, and the epoch is unharmed."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from rankside import (
    backend,
    connected_store,
    errored,
    failure_of,
    leave_default_group,
    seconds,
)
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


def on_gather(outputs: object, inputs: object, root: int = 0) -> object:
    return group().gather(outputs, inputs, rooted(dist.GatherOptions, root))


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
        lambda: all_reduce([ones(3).to_sparse()]),
        ValueError,
        "allreduce: tensors[0]: expected a dense tensor, found layout Sparse",
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
    "scatter_root_too_big": (
        lambda: group().scatter([ones(3)], [[ones(3)] * 2], rooted(dist.ScatterOptions, 7)),
        ValueError,
        "scatter: root rank: expected a rank from 0 to 1, found 7",
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
    "alltoall_of_too_few": (
        lambda: group().alltoall([ones(3)], [ones(3)]),
        ValueError,
        "alltoall: outputs: expected a list of 2 tensors, found 1",
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
    "send_to_nobody": (
        lambda: group().send([ones(3)], 2, 0),
        ValueError,
        "send: destination rank: expected a rank from 0 to 1, found 2",
    ),
    "send_to_oneself": (
        lambda: group().send([ones(3)], group().rank(), 0),
        ValueError,
        "send: destination rank: expected another rank, found this one, {me}",
    ),
    "negative_tag": (
        lambda: group().send([ones(3)], 1 - group().rank(), -1),
        ValueError,
        "send: tag: expected at least 0, found -1",
    ),
    "recv_from_nobody": (
        lambda: group().recv([ones(3)], -3, 0),
        ValueError,
        "recv: source rank: expected a rank from 0 to 1, found -3",
    ),
    "recv_from_oneself": (
        lambda: group().recv([ones(3)], group().rank(), 0),
        ValueError,
        "recv: source rank: expected another rank, found this one, {me}",
    ),
    "recv_into_overlapping_tensor": (
        lambda: group().recv([ones(6).unfold(0, 3, 1)], 1 - group().rank(), 0),
        ValueError,
        "recv: tensors[0]: expected memory for each element, since the result is written to it, "
        "found strides [1, 1] for sizes [4, 3]",
    ),
    "recv_into_expanded_tensor": (
        lambda: group().recv([ones(4, 1).expand(4, 2)], 1 - group().rank(), 0),
        ValueError,
        "recv: tensors[0]: expected memory for each element, since the result is written to it, "
        "found strides [1, 0] for sizes [4, 2]",
    ),
    "send_of_two_tensors": (
        lambda: group().send([ones(3), ones(3)], 1 - group().rank(), 0),
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


ADDRESSES = (
    "",
    "nonsense",
    "127.0.0.1",
    "127.0.0.1:0/x",
    "127.0.0.1:99999/x",
    ":29500/x",
    "[::1/x",
)


def refuse_configure(address: object, rank: object, size: object) -> tuple[str, str]:
    before = backend().epoch
    error = failure_of(lambda: backend().configure(address, rank, size, timeout=seconds(5)))
    assert error is not None, "it was not refused"
    assert backend().epoch == before and backend().errored() is None
    return error.type, error.text


def test_malformed_store_addresses_are_refused_and_the_epoch_goes_on(ranks):
    world = ranks.world(2)
    for address in ADDRESSES:
        kind, text = world.on(0, refuse_configure, address, 0, 2)
        assert kind == "ValueError" and text.startswith("configure: store_addr: expected"), text
        assert f"found '{address}': " in text, text
    for address, found in ((None, "NoneType None"), (29500, "int 29500")):
        kind, text = world.on(0, refuse_configure, address, 0, 2)
        assert kind == "TypeError"
        assert text == f"configure: store_addr: expected a str, found {found}"
    world.run(check_sum)


MEMBERSHIPS = (
    (2, 2, "ValueError", "rank: expected a rank from 0 to 1, found 2"),
    (-1, 2, "ValueError", "rank: expected a rank from 0 to 1, found -1"),
    (1, 1, "ValueError", "rank: expected a rank from 0 to 0, found 1"),
    (0, 0, "ValueError", "world_size: expected at least 1, found 0"),
    (0, -1, "ValueError", "world_size: expected at least 1, found -1"),
    ("0", 2, "TypeError", "rank: expected an int (of 32 bits), found str '0'"),
    (True, 2, "TypeError", "rank: expected an int (of 32 bits), found bool True"),
    (0, 1.5, "TypeError", "world_size: expected an int (of 32 bits), found float 1.5"),
    (0, 1 << 40, "TypeError", f"world_size: expected an int (of 32 bits), found int {1 << 40}"),
)


def test_impossible_memberships_are_refused_and_the_epoch_goes_on(ranks):
    world = ranks.world(2)
    for rank, size, kind, text in MEMBERSHIPS:
        found = world.on(0, refuse_configure, ranks.address(), rank, size)
        assert found == (kind, f"configure: {text}")
    world.run(check_sum)


def refuse_reasons() -> None:
    for bad, found in ((5, "int 5"), (None, "NoneType None")):
        with pytest.raises(TypeError, match=f"^abort: why: expected a str, found {found}$"):
            backend().abort(bad)
    assert backend().errored() is None


def test_abort_with_a_reason_that_is_no_text_is_refused(ranks):
    world = ranks.world(2)
    world.run(refuse_reasons)
    world.run(check_sum)


def refuse_timeouts() -> None:
    address = "127.0.0.1:1/x"
    calls = {
        "set_timeout": lambda bad: backend().set_timeout(bad),
        "configure": lambda bad: backend().configure(address, 0, 1, timeout=bad),
        "check": lambda bad: backend().check(bad),
    }
    for name, call in calls.items():
        for bad in (5, "5", 1.5):
            expected = f"expected a datetime.timedelta, found {type(bad).__name__}"
            with pytest.raises(TypeError, match=f"^{name}: timeout: {expected}$"):
                call(bad)
        for bad in (0, -1):
            expected = f"expected a positive time, found {bad * 1000} ms"
            with pytest.raises(ValueError, match=f"^{name}: timeout: {expected}$"):
                call(seconds(bad))
    with pytest.raises(TypeError, match=r"^set_timeout: timeout: .* found NoneType$"):
        backend().set_timeout(None)


def test_timeouts_must_be_positive_timedeltas(ranks):
    world = ranks.world(2)
    world.run(refuse_timeouts)
    world.run(check_sum)


def limit_of_a_group_made_with(address: str, timeout: float) -> float:
    """What init_process_group() makes of that many seconds, which may be too few for a group."""
    import torchft_ext

    leave_default_group()
    store = connected_store(address)
    try:
        dist.init_process_group("ft", store=store, rank=0, world_size=1, timeout=seconds(timeout))
        return backend().options._timeout.total_seconds()
    except torchft_ext.CommTimeoutError as error:
        return error.limit.total_seconds()


def refuse_timeouts_of_groups(address: str) -> None:
    for bad, found in ((0, "0"), (-1, "-1000"), (-0.0005, "-0.5")):
        expected = f"expected a positive time, found {found} ms"
        with pytest.raises(ValueError, match=f"^init_process_group: timeout: {expected}$"):
            limit_of_a_group_made_with(address, bad)


def test_timeout_of_init_process_group_must_be_positive(ranks):
    ranks.world(1).on(0, refuse_timeouts_of_groups, ranks.address())


@pytest.mark.parametrize(("given", "kept"), [(0.0005, 0.001), (30.001, 30.001), (30.0001, 30.001)])
def test_timeout_of_init_process_group_is_rounded_up_to_milliseconds(ranks, given, kept):
    world = ranks.world(1)
    assert world.on(0, limit_of_a_group_made_with, ranks.address(), given) == kept


def refuse_what_is_no_group() -> None:
    import torchft_ext

    with pytest.raises(TypeError, match="expected a process group or None, found str"):
        torchft_ext.backend("text")


def test_backend_of_something_else_than_a_group_is_refused(ranks):
    ranks.world(1).run(refuse_what_is_no_group)


WRONG_OPTIONS = {
    "timeout": (5, "a datetime.timedelta, found int"),
    "heartbeat": (5, "a datetime.timedelta, found int"),
    "interface": (7, "a str or None, found int 7"),
    "port_range": (7000, "a str or None, found int 7000"),
    "local_sockets": (1, "a bool or None, found int 1"),
    "nan_check": (2, "a bool or None, found int 2"),
    "poison": (None, "a bool, found NoneType None"),
    "high_priority_stream": (1, "a bool, found int 1"),
    "blocking_wait": ("no", "a bool, found str 'no'"),
}


def refuse_options() -> None:
    import torchft_ext

    for name, (bad, text) in WRONG_OPTIONS.items():
        with pytest.raises(TypeError, match=f"^Options: {name}: expected {text}$"):
            torchft_ext.Options(**{name: bad})
    with pytest.raises(TypeError):
        torchft_ext.Options(datetime.timedelta(seconds=5))  # keyword-only
    with pytest.raises(TypeError):
        torchft_ext.Options(colour="red")


def test_options_of_wrong_types_are_refused(ranks):
    ranks.world(1).run(refuse_options)


def refuse_what_are_no_options(address: str) -> None:
    found = "pg_options: expected torchft_ext.Options, found int"
    with pytest.raises(TypeError, match=rf"^new_group\('ft'\): {found}$"):
        dist.new_group(backend="ft", pg_options=5)
    with pytest.raises(
        ValueError, match=r"^new_group: timeout: expected a positive .* found 0 ms$"
    ):
        dist.new_group(backend="ft", timeout=seconds(0))
    leave_default_group()
    store = connected_store(address)
    with pytest.raises(TypeError, match=rf"^init_process_group\('ft'\): {found}$"):
        dist.init_process_group("ft", store=store, rank=0, world_size=1, pg_options=5)


def test_bad_settings_of_a_group_are_refused_in_the_name_of_the_function_that_was_called(ranks):
    ranks.fresh(1).on(0, refuse_what_are_no_options, ranks.address())


PORTS = "expected a range of at least 3 ports such as '7000-7100'"
BAD_OPTIONS = (
    ({"port_range": "9000-8000"}, f"Options: port_range: {PORTS}, found '9000-8000'"),
    ({"port_range": "port"}, f"Options: port_range: {PORTS}, found 'port'"),
    ({"port_range": "7000"}, f"Options: port_range: {PORTS}, found '7000'"),
    ({"port_range": "7000-7001"}, f"Options: port_range: {PORTS}, found '7000-7001'"),
    ({"interface": ""}, "Options: interface: expected a name, found ''"),
    (
        {"interface": "nonexistent9"},
        "Options.interface: expected the name of an interface that is up and has an address, "
        "found 'nonexistent9'",
    ),
    (
        {"heartbeat": seconds(-1)},
        "Options: heartbeat: expected zero (off) or at least 100 ms, found -1000 ms",
    ),
    (
        {"heartbeat": datetime.timedelta(days=2)},
        "Options: heartbeat: expected at most 24 hours (zero: off), found 48 hours",
    ),
    ({"timeout": seconds(-1)}, "Options: timeout: expected a positive time, found -1000 ms"),
)


def group_with(options: dict) -> None:
    import torchft_ext

    dist.new_group(backend="ft", pg_options=torchft_ext.Options(**options))


def bad_option_values() -> list[tuple[str, str]]:
    errors = [failure_of(lambda o=options: group_with(o)) for options, _ in BAD_OPTIONS]
    return [("accepted", "") if error is None else (error.type, error.text) for error in errors]


def test_options_with_bad_values_are_refused_by_name(ranks):
    found = ranks.fresh(1).on(0, bad_option_values)
    assert found == [("ValueError", text) for _, text in BAD_OPTIONS]


def refuse_foreign_groups() -> str:
    import torchft_ext

    with pytest.raises(ValueError) as caught:
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
