"""Bad settings, addresses and memberships are refused, and the generation is unharmed."""

from __future__ import annotations

import datetime

import pytest
import torch.distributed as dist
from rankside import (
    backend,
    connected_store,
    failure_of,
    leave_default_group,
    seconds,
)
from values import check_sum

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
    before = backend().generation
    error = failure_of(lambda: backend().configure(address, rank, size, timeout=seconds(5)))
    assert error is not None, "it was not refused"
    assert backend().generation == before and backend().errored() is None
    return error.type, error.text


def test_malformed_store_addresses_are_refused_and_the_generation_goes_on(ranks):
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


def test_impossible_memberships_are_refused_and_the_generation_goes_on(ranks):
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
    "ask_after": (5, "a datetime.timedelta, found int"),
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
    (
        {"ask_after": seconds(-1)},
        "Options: ask_after: expected 0 (off) to 24 hours, found -1000 ms",
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
