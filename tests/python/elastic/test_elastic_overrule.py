"""A job that has lost its quorum waits for an operator, who lets one member go on alone."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from elastic_side import come, jobs, leave_once_in, members
from ranks import World
from rankside import ErrorInfo, failure_of

from torchft_ext.elastic import _overrule_command
from torchft_ext.elastic._errors import LeftOutError, NoQuorumError
from torchft_ext.elastic._overrule import Operator, Orders

world = members(3)
NOW = timedelta(0)


@pytest.fixture
def orders() -> Orders:
    return Orders(dist.HashStore())


def test_one_of_the_members_that_wait_takes_the_order(orders):
    assert not orders.take(7, "a")
    orders.give(7)
    assert not orders.take(6, "a")
    assert orders.take(7, "b") and orders.take(7, "b")
    with pytest.raises(LeftOutError, match="member b goes on alone from view 7: join again"):
        orders.take(7, "a")
    assert orders.taker(7, NOW) == "b"


def test_order_that_nobody_takes_is_withdrawn(orders):
    orders.give(7)
    assert orders.taker(7, NOW) is None
    assert not orders.take(7, "a")
    orders.give(7)  # once more
    assert orders.take(7, "a")


def test_member_waits_until_it_leaves_also_without_a_store():
    leaving: list[bool] = []
    operator = Operator("127.0.0.1:9/job", "a", timedelta(seconds=0.1), lambda: bool(leaving))
    lost = NoQuorumError("two are missing")
    assert not operator.has_spoken(lost, 7)
    leaving.append(True)
    with pytest.raises(LeftOutError, match=r"told to leave .* two are missing"):
        operator.has_spoken(lost, 7)


@pytest.mark.parametrize("address", ["host", "host/job", "host:port/job", "host:1"])
def test_command_expects_an_address(address, capsys):
    assert _overrule_command.main([address, "--view", "1"]) == 1
    assert f"expected 'host:port/name', found '{address}'" in capsys.readouterr().err


def test_survivor_goes_on_by_an_operators_word(ranks, world, capsys):
    address = ranks.address()
    assert _overrule_command.main([address, "--view", "1"]) == 1
    assert "there is no job of this name" in capsys.readouterr().err
    world.run(come, address, 3, on_no_quorum="wait")
    assert world.run(size_after_recovery) == [3] * 3
    assert _overrule_command.main([address, "--view", "2", "--timeout", "1"]) == 1
    assert "no member waits for a word on view 2" in capsys.readouterr().err
    world.kill(1)
    world.kill(2)
    alone = world.start(0, size_after_recovery)
    assert _overrule_command.main([address, "--view", "1"]) == 0
    assert "goes on alone from view 1; the others join it anew" in capsys.readouterr().out
    assert alone.value() == 1


def size_after_recovery() -> int:
    return jobs[0].recover().size


def test_wait_for_a_word_ends_by_leaving(ranks, world):
    pair = World(ranks, world.workers[:2])
    pair.run(come, ranks.address(), 2, on_no_quorum="wait", rule="store", min_size=2)
    assert pair.run(size_after_recovery) == [2] * 2
    pair.kill(1)
    waiting = pair.start(0, error_of_recovery)
    pair.side(0, leave_once_in, "has_spoken")
    assert waiting.value() == "LeftOutError"


def error_of_recovery() -> str:
    error = failure_of(lambda: jobs[0].recover())
    assert isinstance(error, ErrorInfo)
    return error.type
