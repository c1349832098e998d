"""What torch refuses or leaves out for backends that are not its own reaches this one."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
import torch.distributed as dist
from rankside import ErrorInfo, backend, connected_store, failure_of, leave_default_group, seconds

LIMIT = 0.5  # seconds
SOON = 20.0  # seconds; below the limit that groups have


def set_limit(group: dist.ProcessGroup | None = None) -> None:
    """As torchtitan does after its first step; a warning would be an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning)  # deprecated since 2.14
        dist.distributed_c10d._set_pg_timeout(seconds(LIMIT), group)


def sum_within_limit(name: str) -> ErrorInfo | None:
    group = dist.group.WORLD if name == "default" else dist.new_group(backend="ft")
    set_limit(None if name == "default" else group)
    if dist.get_rank() != 0:
        return None
    return failure_of(lambda: dist.all_reduce(torch.ones(1), group=group))


@pytest.mark.parametrize("name", ["default", "new_group"])
def test_limit_set_by_torchs_function_holds(ranks, name):
    error = ranks.fresh(2).run(sum_within_limit, name)[0]
    assert error.type == "CommTimeoutError"
    assert LIMIT <= error.fields["elapsed"] < SOON and error.fields["limit"] == LIMIT


def bad_limit_and_bad_group() -> None:
    with pytest.raises(ValueError, match="expected a positive time"):
        dist.distributed_c10d._set_pg_timeout(seconds(0))
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.distributed_c10d._set_pg_timeout(seconds(1), dist.GroupMember.NON_GROUP_MEMBER)


def test_bad_limits_and_groups_are_refused(ranks):
    ranks.world(1).run(bad_limit_and_bad_group)


def limits_beside_another(address: str) -> list[float]:
    """Of a group whose devices have different backends; and of one without any of ours."""
    leave_default_group()
    store = connected_store(address)
    dist.init_process_group("cpu:ft_host,cuda:gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    set_limit()
    theirs = dist.new_group([0], backend="gloo")
    set_limit(theirs)
    limits = [
        backend().options._timeout,
        group._get_backend(torch.device("cuda")).options._timeout,
        theirs._get_backend(torch.device("cpu")).options._timeout,
    ]
    dist.monitored_barrier(theirs)
    leave_default_group()
    return [limit.total_seconds() for limit in limits]


def test_limit_reaches_other_backends_of_the_group_too(ranks):
    assert ranks.world(1).on(0, limits_beside_another, ranks.address()) == [LIMIT] * 3


def refused_by_torch(address: str) -> str:
    leave_default_group()
    store = connected_store(address)
    dist.init_process_group("cuda:gloo", store=store, rank=0, world_size=1)
    began = time.monotonic()
    error = failure_of(lambda: dist.monitored_barrier(timeout=seconds(SOON)))
    assert time.monotonic() - began < SOON
    leave_default_group()
    return error.type


def test_groups_of_others_have_torchs_own_functions(ranks):
    assert ranks.world(1).on(0, refused_by_torch, ranks.address()) == "ValueError"


def patched_twice() -> None:
    import torchft_ext._torch_patches as patches
    from torchft_ext._backends import backends_of

    names = ("_set_pg_timeout", "monitored_barrier", "_get_split_source")
    before = [getattr(dist.distributed_c10d, name, None) for name in names]
    patches.install(backends_of)
    assert before == [getattr(dist.distributed_c10d, name, None) for name in names]
    assert dist.monitored_barrier is dist.distributed_c10d.monitored_barrier
    assert dist.monitored_barrier.__doc__ is not None


def test_patches_are_made_once(ranks):
    ranks.world(1).run(patched_twice)
