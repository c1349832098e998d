"""Groups of torchft_ext.process_group that meet by handles, as reconfigure() has it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from process_group_side import LIMIT, leave
from ranks import World, values_of
from rankside import kept, leave_default_group, seconds

from torchft_ext import CommTimeoutError
from torchft_ext import process_group as pgs


def handle(kind: str) -> str:
    leave_default_group()
    kept["group"] = getattr(pgs, f"ProcessGroup{kind}")(timeout=LIMIT)
    return kept["group"].get_reconfigure_handle()


def meet(handles: list[str], uuid: int) -> tuple[int, int, float]:
    """As torch's reconfigure() is called since 2.14."""
    group = kept["group"]
    group.reconfigure(SimpleNamespace(handles=handles, uuid=uuid, timeout=None)).wait()
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    return group.rank(), group.size(), tensor.item()


@pytest.mark.parametrize("kind", ["Host", "Gloo", "BabyHost"])
def test_members_meet_by_their_handles_alone(ranks, kind):
    world = World(ranks, ranks.borrow(3))
    handles = world.run(handle, kind)
    assert world.run(meet, handles, 1) == [(rank, 3, 3.0) for rank in range(3)]
    calls = [world.start(rank, meet, [handles[2], handles[0]], 2) for rank in (2, 0)]
    assert values_of(calls) == [(0, 2, 2.0), (1, 2, 2.0)]
    world.run(leave)


def test_bad_handles_are_refused_and_leave_the_group():
    group = pgs.ProcessGroupHost(timeout=LIMIT)
    own, other = group.get_reconfigure_handle(), pgs.ProcessGroupHost().get_reconfigure_handle()
    group.reconfigure(SimpleNamespace(handles=[own], uuid=1, timeout=None)).wait()
    for handles, words in [
        ({own}, "in the order of ranks"),
        ([], "in the order of ranks"),
        ([other], "own once, found it 0 times"),
        ([own, own], "own once, found it 2 times"),
        ([own, "urn:other"], "expected those of get_reconfigure_handle"),
        (['{"id": "1", "store": "nowhere"}', own], "expected those of get_reconfigure_handle"),
        ([own, own + " " * 5000], "expected those of get_reconfigure_handle"),
    ]:
        with pytest.raises(ValueError, match=words):
            group.reconfigure(SimpleNamespace(handles=handles, uuid=2, timeout=None))
    assert group.errored() is None
    group.shutdown()


def test_only_the_first_members_store_need_be_an_address():
    """As torchft's nightly has it, whose tests name a member that never comes so."""
    group = pgs.ProcessGroupHost(timeout=LIMIT)
    handles = [group.get_reconfigure_handle(), '{"id": "missing", "store": "unused"}']
    with pytest.raises(CommTimeoutError):
        group.reconfigure(SimpleNamespace(handles=handles, uuid=1, timeout=seconds(0.5)))
    group.shutdown()


@pytest.mark.parametrize("kind", ["Host", "Gloo"])
def test_limit_of_reconfigure_is_the_one_that_it_is_given(kind):
    group = getattr(pgs, f"ProcessGroup{kind}")(timeout=LIMIT)
    absent = pgs.ProcessGroupHost().get_reconfigure_handle()
    handles = [group.get_reconfigure_handle(), absent]
    for wrapped in (group, pgs.ProcessGroupWrapper(group)):
        own = [wrapped.get_reconfigure_handle(), absent] if wrapped is not group else handles
        began = time.monotonic()
        with pytest.raises(CommTimeoutError):
            wrapped.reconfigure(SimpleNamespace(handles=own, uuid=1, timeout=seconds(2.0)))
        assert time.monotonic() - began < LIMIT / 2
    group.shutdown()
