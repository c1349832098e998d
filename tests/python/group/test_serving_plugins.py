"""The plugins for serving engines, against doubles of the engines' classes.

scripts/check_serving.sh runs them in the engines themselves.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import World
from rankside import failure_of, leave_default_group, seconds

import torchft_ext
from torchft_ext import _sglang, _vllm

BUILDERS = "vllm.distributed.utils"
kept: dict[str, Any] = {}


class Sentinel:
    """As much of vLLM's EngineCoreSentinel as the plugin stands around."""

    engine_recovery_timeout_sec = 60

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.fault_info: str | None = None
        self.pushed: list[str | None] = []
        self._dp_reinit_epoch = 0

    def on_fault(self, error: Exception) -> None:
        self.fault_info = type(error).__name__
        self._push_status()

    def _push_status(self) -> None:
        self.pushed.append(self.fault_info)

    def _reinit_dp_group(self) -> dict[str, Any]:
        return {"theirs": True}


def make_double(name: str, **contents: Any) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(contents)
    return module


def begin(address: str, rank: int, size: int) -> int:
    """The group of an engine, made by vLLM's function and of its store, as its engines do."""
    leave_default_group()
    builders = make_double(BUILDERS, init_gloo_process_group=pytest.fail)
    make_double(_vllm._ENGINE, EngineCoreSentinel=Sentinel)
    kept["replaced"] = torchft_ext.replace_gloo()
    _vllm.register()
    host, port = address.split("/")[0].rsplit(":", 1)
    store = dist.TCPStore(host, int(port), is_master=False)
    group = builders.init_gloo_process_group(
        dist.PrefixStore(address, store), rank, size, seconds(60)
    )
    parallel = SimpleNamespace(
        data_parallel_size=size, data_parallel_rank=rank, data_parallel_master_ip=host
    )
    config = SimpleNamespace(parallel_config=parallel)
    kept["engine"] = SimpleNamespace(dp_group=group, dp_store=store, vllm_config=config)
    kept["group"] = group
    return group.size()


def end() -> None:
    kept.pop("replaced").__exit__(None, None, None)
    kept.clear()
    for name in (BUILDERS, _vllm._ENGINE):
        sys.modules.pop(name, None)


def summed() -> float:
    tensor = torch.ones(1, dtype=torch.int32)
    dist.all_reduce(tensor, group=kept["group"])
    return tensor.item()


def pushed_after_the_fault() -> str:
    kept["sentinel"] = sentinel = Sentinel(kept["engine"])
    with pytest.raises(torchft_ext.CommError) as caught:
        summed()
    sentinel.on_fault(caught.value)
    assert len(sentinel.pushed) == 1
    return sentinel.pushed[0] or ""


def recover() -> tuple[bool, int, int, list[int]]:
    given = kept["sentinel"]._reinit_dp_group()
    group = kept["group"]
    same = kept["engine"].dp_group is group
    return same, group.rank(), group.size(), given["torchft_ext"]["members"]


@pytest.fixture
def engines(ranks):
    made = World(ranks, ranks.borrow(3))
    address = ranks.address()
    calls = [made.start(rank, begin, address, rank, 3) for rank in range(3)]
    assert [call.value() for call in calls] == [3] * 3
    yield made
    made.run_at_the_end(end)


def test_fault_information_of_vllm_names_rank_and_process(engines):
    pid = engines.workers[1].pid
    engines.kill(1)
    for rank in (0, 2):
        text = engines.on(rank, pushed_after_the_fault)
        assert text.startswith("PeerLostError: "), text
        assert "rank 1 (" in text and f"pid {pid}" in text, text


def test_engines_that_are_left_keep_their_group(engines):
    engines.kill(1)
    for rank in (0, 2):
        engines.on(rank, pushed_after_the_fault)
    calls = [engines.start(rank, recover) for rank in (0, 2)]
    found = [call.value() for call in calls]
    assert [tuple(one) for one in found] == [(True, 0, 2, [0, 2]), (True, 1, 2, [0, 2])]
    sums = [engines.start(rank, summed) for rank in (0, 2)]
    assert [call.value() for call in sums] == [2, 2]


def meet_late() -> str:
    store = dist.PrefixStore("late", kept["engine"].dp_store)
    store.set("members", "[0]")
    error = failure_of(lambda: _vllm._meet(store, 1, [0], timedelta(seconds=60)))
    return "" if error is None else error.text


def test_engine_that_comes_too_late_is_told_so(engines):
    text = engines.on(1, meet_late)
    assert "engines [0] went on without it" in text and "restart" in text


def test_plugin_does_nothing_where_gloo_is_not_replaced(monkeypatch):
    before = dict(vars(Sentinel))
    monkeypatch.setitem(sys.modules, _vllm._ENGINE, SimpleNamespace(EngineCoreSentinel=Sentinel))
    _vllm.register()
    assert dict(vars(Sentinel)) == before


def fail_as_sglang(**options: object) -> None:
    """As its barrier after loading does."""
    try:
        raise torchft_ext.PeerLostError("barrier: rank 1 (host a, pid 7): its process ended")
    except RuntimeError:
        raise ValueError("there are other ranks that didn't finish loading.") from None


def test_error_of_sglang_after_loading_names_rank_and_process():
    with pytest.raises(ValueError, match=r"finish loading\. barrier: rank 1 \(host a, pid 7\)"):
        _sglang._dist_barrier_after_load(fail_as_sglang, tp_rank=0)


def test_errors_of_others_after_loading_stay_as_they_are():
    def fail(**options: object) -> None:
        raise ValueError("another")

    with pytest.raises(ValueError, match=r"^another$"):
        _sglang._dist_barrier_after_load(fail, tp_rank=0)


def rows_of_a_step(rank: int) -> list[int]:
    """In one operation; SGLang's own way is not taken."""
    make_double(_sglang._STEP, all_gather_single=dist.all_gather_into_tensor)
    try:
        rows = torch.empty(3, dtype=torch.int32)
        row = torch.tensor([rank], dtype=torch.int32)
        group = dist.new_group(backend="gloo")
        _sglang._exchange_sync_rows(pytest.fail, rows, row, group)
    finally:
        del sys.modules[_sglang._STEP]
    return rows.tolist()


def begin_default_group(address: str, rank: int) -> None:
    leave_default_group()
    kept["replaced"] = torchft_ext.replace_gloo()
    host, port = address.split("/")[0].rsplit(":", 1)
    store = dist.PrefixStore(address, dist.TCPStore(host, int(port), is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)


def leave() -> None:
    leave_default_group()
    end()


def test_step_of_sglang_is_one_operation(ranks):
    made = World(ranks, ranks.borrow(3))
    address = ranks.address()
    calls = [made.start(rank, begin_default_group, address, rank) for rank in range(3)]
    for call in calls:
        call.value()
    steps = [made.start(rank, rows_of_a_step, rank) for rank in range(3)]
    assert [call.value() for call in steps] == [[0, 1, 2]] * 3
    made.run_at_the_end(leave)
