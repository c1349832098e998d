"""vLLM's plugin "torchft_ext": its fault handling over groups of this package.

vLLM calls register() in each of its processes. Where "gloo" is not replaced it does nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import torchft_ext_names
from torchft_ext import _C, _torch_patches
from torchft_ext._backends import backends_of
from torchft_ext.errors import CommError

_ENGINE = "vllm.v1.fault_tolerance.engine_core_sentinel"
_WORKER = "vllm.v1.worker.sentinel.gpu_worker_sentinel"
_PARAMETER = "torchft_ext"  # of vLLM's request to the workers

_Around = list[tuple[Any, str, Callable[..., Any]]]


def register() -> None:
    """Stand around the methods of vLLM's sentinels, now or when they are imported. Idempotent.

    Versions: vLLM 0.33. Reason: its fault information names the error's class alone, and its
    recovery makes new groups of the old size. End: with hooks of vLLM's own for both.
    """
    if not torchft_ext_names.replaces_gloo(c10d):
        return
    _torch_patches.when_imported(_ENGINE, lambda: _torch_patches.around(_of_engine()))
    _torch_patches.when_imported(_WORKER, lambda: _torch_patches.around(_of_worker()))


def _of_engine() -> _Around:
    sentinel = getattr(sys.modules[_ENGINE], "EngineCoreSentinel", None)
    return _known(
        [
            (sentinel, "on_fault", _on_fault),
            (sentinel, "_push_status", _push_status),
            (sentinel, "_reinit_dp_group", _reinit_dp_group),
        ]
    )


def _of_worker() -> _Around:
    return _known([(getattr(sys.modules[_WORKER], "WorkerSentinel", None), "retry", _retry)])


def _known(around: _Around) -> _Around:
    """Return none of them where one is not there: another version's."""
    return around if all(callable(getattr(owner, name, None)) for owner, name, _ in around) else []


def _backend(group: dist.ProcessGroup | None) -> _C.Backend | None:
    return None if group is None else next(backends_of(group), None)


# ---------------------------------------------------------------- the cause


def _on_fault(theirs: Callable[[Any, Exception], None], self: Any, error: Exception) -> None:
    self._torchft_ext_fault = _failure_behind(error, getattr(self.engine, "dp_group", None))
    theirs(self, error)


def _failure_behind(error: Exception, group: dist.ProcessGroup | None) -> CommError | None:
    """Return the failure of a group: the error itself, or that of the engine's own group.

    An error of a worker process reaches its engine as another one.
    """
    if isinstance(error, CommError):
        return error
    ours = _backend(group)
    return None if ours is None else ours.errored()


def _push_status(theirs: Callable[[Any], None], self: Any) -> None:
    """Send the failure's whole text, with rank, host, process id and how it was known."""
    failure = getattr(self, "_torchft_ext_fault", None)
    if failure is not None and self.fault_info is not None and str(failure) not in self.fault_info:
        self.fault_info = f"{self.fault_info}: {failure}"
    theirs(self)


# ---------------------------------------------------------------- recovery


def _reinit_dp_group(theirs: Callable[[Any], dict[str, Any]], self: Any) -> dict[str, Any]:
    """Begin a generation of the engines' group with those that are left. The object stays.

    Blocks up to the limits below. Returns what the workers are told: where to meet, and the ranks,
    in vLLM's numbering, of those that go on.

    Raises:
        CommError: the generation could not be formed; vLLM answers so, and retry() may come again.
        RuntimeError: this engine came too late, or rank 0, which has the store, is lost.
    """
    engine = self.engine
    ours = _backend(getattr(engine, "dp_group", None))
    if ours is None:
        return theirs(self)
    config = engine.vllm_config.parallel_config
    epoch = self._dp_reinit_epoch
    self._dp_reinit_epoch += 1
    before = getattr(self, "_torchft_ext_members", list(range(config.data_parallel_size)))
    rank = config.data_parallel_rank
    limit = timedelta(seconds=self.engine_recovery_timeout_sec)
    place = f"torchft_ext/{epoch}"
    store = dist.PrefixStore(place, engine.dp_store)
    left = [each for each in before if each not in _lost(ours, before)]
    members = _meet(store, rank, left, limit)
    address = f"{config.data_parallel_master_ip}:{engine.dp_store.port}/{place}"
    ours.configure(f"{address}/engines", rank=members.index(rank), world_size=len(members))
    self._torchft_ext_members = members
    return {_PARAMETER: {"address": f"{address}/workers", "members": members}}


def _lost(ours: _C.Backend, members: list[int]) -> list[int]:
    """Return the member that the failed generation lost, if it is known."""
    failure = ours.errored()
    rank = None if failure is None else failure.cause.rank
    return [] if rank is None or rank == ours.rank() else [members[rank]]


def _meet(store: dist.Store, rank: int, left: list[int], limit: timedelta) -> list[int]:
    """Return the ranks that have come: rank 0, which has vLLM's store, decides.

    It waits for all in `left`, up to half of the limit, so that the others learn of it within
    theirs.
    """
    store.set(str(rank), "")
    if rank == 0:
        store.set("members", json.dumps(_that_come(store, left, limit / 2)))
    try:
        store.wait(["members"], limit)
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"engine {rank}: recovery: engine 0 did not say who goes on within {limit}: is it "
            "lost, or was it not told to retry? It has the store of the data-parallel group; "
            "without it restart all engines"
        ) from error
    members: list[int] = json.loads(store.get("members"))
    if rank not in members:
        raise RuntimeError(
            f"engine {rank}: recovery: engines {members} went on without it, since it did not "
            f"come within {limit / 2}; restart this engine's process"
        )
    return members


def _that_come(store: dist.Store, expected: list[int], limit: timedelta) -> list[int]:
    try:
        store.wait([str(rank) for rank in expected], limit)
    except dist.DistStoreError:
        return [rank for rank in expected if store.check([str(rank)])]
    return expected


def _retry(theirs: Callable[[Any, Any], None], self: Any, request: Any) -> None:
    """As the worker's own, but that its group begins a generation with the members that are left.

    Raises:
        CommError: the generation could not be formed.
    """
    given = request.params.get(_PARAMETER)
    if given is None:
        return theirs(self, request)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    self._clean_worker_state()
    if self.dp_size == 1:
        return None
    of_vllm: Any = sys.modules[_WORKER]
    of_vllm.get_ep_all2all_manager().clean_buffers()
    ours = _backend(of_vllm.get_dp_group().cpu_group)
    if ours is None:
        raise RuntimeError(
            "worker: recovery: its engine's group is of torchft_ext, its own is not; set "
            "TORCHFT_EXT_REPLACE_GLOO=1 for all processes"
        )
    place = self.worker.rank % self.worker.parallel_config.world_size
    members = given["members"]
    ours.configure(
        f"{given['address']}/{place}", rank=members.index(self.dp_rank), world_size=len(members)
    )
    return None
