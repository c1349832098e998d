"""torchft_ext.elastic.sync(): who has the state sends, who lacks something takes just that."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rankside import PATIENCE, backend, connected_store, failure_of, kept, operations, seconds
from torch import nn

from torchft_ext.elastic import _description, _transfer, _wire
from torchft_ext.elastic._drift import distance, sketch
from torchft_ext.elastic._errors import StateLostError
from torchft_ext.elastic._sampler import BatchSampler
from torchft_ext.elastic._state import State
from torchft_ext.elastic._sync import SyncReport, sync
from torchft_ext.elastic._transfer import buckets
from torchft_ext.elastic._versions import Header, choose_source

LINEAGE = b"lineage 16 bytes"
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
]
MANY = 12
WEIGHT_BYTES = 12 * 4  # of model/0.weight
COLD = {"continuing": False, "dirty": True, "lineage": bytes(16)}  # a newcomer's first sync

# What runs in the ranks; each keeps its state in `kept`.


def make(seed: int, steps: int = 0) -> None:
    """A state that has gone through some steps; all of one seed are equal."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])
    state = kept["state"] = State(model, optimizer, scheduler, BatchSampler(20, 3))
    for _ in range(steps):
        state.clear_gradients()
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        state.commit()


def make_seeded_by_rank() -> str:
    make(dist.get_rank())
    return kept["state"].digest()


def spoil(path: str) -> None:
    """Change one bit of one tensor."""
    for part in kept["state"].encode().values():
        if path in part.tensors:
            part.tensors[path].view(torch.uint8).view(-1)[0] ^= 1


def change_rate() -> None:
    kept["state"].objects["optimizer"].param_groups[0]["lr"] = 0.5


def commit_once_more() -> None:
    """Another step, of one member alone."""
    kept["state"].commit()


def drift_apart(path: str, by: float) -> None:
    """Relative to the norm."""
    with torch.no_grad():
        for part in kept["state"].encode().values():
            if path in part.tensors:
                tensor = part.tensors[path]
                off = torch.randn(tensor.shape)
                tensor += by * tensor.norm() * off / off.norm()


def share(
    continuing: bool = True,
    dirty: bool = False,
    lineage: bytes = LINEAGE,
    drift: float = 0.0,
) -> SyncReport:
    state = kept["state"]
    return sync(
        state,
        dist.group.WORLD,
        continuing=continuing,
        lineage=lineage,
        step=state.step,
        dirty=dirty,
        drift=drift,
    )


def failed_share(**options: bool):
    return failure_of(lambda: share(**options))


def digest() -> tuple[str, int, bool]:
    state = kept["state"]
    return state.digest(), state.step, state.dirty


def memory() -> list[int]:
    return [parameter.data_ptr() for parameter in kept["state"].objects["model"].parameters()]


def operations_of_share() -> int:
    before = operations()
    share()
    return operations() - before


# The tests' own helpers.


def world_of(ranks, size: int, *, steps: int = 3, newcomers: int = 0):
    """Members of one state, and at the end newcomers with a fresh one."""
    world = ranks.world(size)
    for rank in range(size):
        old = rank < size - newcomers
        world.on(rank, make, 1 if old else 2 + rank, steps if old else 0)
    return world


def run_each(world, function, options: list[dict]) -> list:
    calls = [world.start(rank, function, **options[rank]) for rank in range(world.size)]
    return [call.value() for call in calls]


def assert_alike(world, step: int) -> str:
    """All have one clean state; its digest."""
    found = world.run(digest)
    assert found == [(found[0][0], step, False)] * world.size
    return found[0][0]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_first_view_takes_rank_0s_state(ranks, size):
    world = ranks.world(size)
    digests = world.run(make_seeded_by_rank)
    reports = world.run(share, continuing=False)
    assert assert_alike(world, 0) == digests[0]
    assert reports[0].took == tuple(range(1, size))


def test_nothing_is_sent_where_nothing_differs(ranks):
    world = world_of(ranks, 3)
    reports = world.run(share)
    assert [(r.took, r.tensors, r.nbytes) for r in reports] == [((), 0, 0)] * 3
    assert world.run(operations_of_share) == [2] * 3


@pytest.mark.parametrize("size", [2, 3, 5])
def test_newcomer_gets_weights_and_optimizer_state_that_it_had_not(ranks, size):
    world = world_of(ranks, size, newcomers=1)
    before, place = world.on(0, digest), world.on(size - 1, memory)
    others = [{}] * (size - 1)
    reports = run_each(world, share, [*others, {"continuing": False, "dirty": True}])
    assert assert_alike(world, 3) == before[0]
    assert {(r.source, r.step, r.took) for r in reports} == {(0, 3, (size - 1,))}
    assert world.on(size - 1, memory) == place


@pytest.mark.parametrize("steps", [0, 3])  # 0: the newcomers' structure is the same already
def test_cold_newcomer_takes_everything_and_nobody_hashes_for_it(ranks, steps):
    world = world_of(ranks, 3, newcomers=2, steps=steps)
    before = world.on(0, digest)
    hashes = run_each(world, hashes_of_share, [{}, COLD, COLD])
    assert hashes == [0] * 3
    assert assert_alike(world, steps) == before[0]


def hashes_of_share(**options: bool) -> int:
    real, calls = _description.hash_leaves, []
    _description.hash_leaves = lambda parts: calls.append(1) or real(parts)
    try:
        share(**options)
    finally:
        _description.hash_leaves = real
    return len(calls)


def test_members_verify_each_other_when_a_cold_newcomer_joins(ranks):
    world = world_of(ranks, 3, newcomers=1)
    assert run_each(world, hashes_of_share, [{}, {}, COLD]) == [1, 1, 0]
    assert_alike(world, 3)
    world.on(1, spoil, "model/0.weight")
    errors = run_each(world, failed_share, [{}, {}, COLD])
    assert [error.type for error in errors] == ["DivergenceError"] * 3


def test_training_goes_on_alike_after_a_sync(ranks):
    world = world_of(ranks, 2, newcomers=1)
    run_each(world, share, [{}, {"continuing": False}])
    world.run(train_on)
    assert_alike(world, 4)


def train_on() -> None:
    """One step more of the state that is there."""
    torch.manual_seed(9)
    state = kept["state"]
    state.clear_gradients()
    state.objects["model"](torch.randn(8, 3)).square().sum().backward()
    state.objects["optimizer"].step()
    state.objects["scheduler"].step()
    state.commit()


def test_only_the_tensor_that_differs_is_sent(ranks):
    world = world_of(ranks, 3)
    world.on(1, spoil, "model/0.weight")
    reports = run_each(world, share, [{}, {"dirty": True}, {}])
    assert [(r.took, r.tensors, r.nbytes) for r in reports] == [((1,), 1, WEIGHT_BYTES)] * 3
    assert_alike(world, 3)


def test_rejoiner_with_the_same_state_takes_nothing(ranks):
    world = world_of(ranks, 3)
    reports = run_each(world, share, [{}, {}, {"continuing": False, "dirty": True}])
    assert [(r.took, r.tensors) for r in reports] == [((), 0)] * 3


def test_member_of_the_highest_step_is_the_source(ranks):
    world = world_of(ranks, 3)
    world.on(2, commit_once_more)
    ahead = world.on(2, digest)
    reports = world.run(share)
    assert {r.source for r in reports} == {2}
    assert assert_alike(world, 4) == ahead[0]


def test_stale_state_of_another_job_does_not_win(ranks):
    world = world_of(ranks, 2)
    for _ in range(5):
        world.on(1, commit_once_more)
    before = world.on(0, digest)
    run_each(world, share, [{}, {"continuing": False, "lineage": bytes(16)}])
    assert assert_alike(world, 3) == before[0]


def test_first_view_of_a_job_goes_on_from_a_checkpoint_that_one_has(ranks):
    world = ranks.world(2)
    world.on(0, make, 1)
    world.on(1, make, 2, 4)
    loaded = world.on(1, digest)
    world.run(share, continuing=False)
    assert assert_alike(world, 4) == loaded[0]


def test_buffers_may_differ_and_become_the_sources(ranks):
    world = world_of(ranks, 3)
    world.on(2, spoil, "model/1.running_mean")
    before = world.on(0, digest)
    assert [(r.took, r.tensors) for r in world.run(share)] == [((2,), 1)] * 3
    assert assert_alike(world, 3) == before[0]


def test_divergence_names_the_first_leaf_and_the_ranks_on_all(ranks):
    world = world_of(ranks, 3)
    world.on(1, spoil, "model/2.weight")
    world.on(2, spoil, "model/0.weight")
    errors = world.run(failed_share)
    assert {error.type for error in errors} == {"DivergenceError"}
    start = "sync: model/0.weight: ranks [2] differ from rank 0, though all have committed step 3"
    assert all(error.text.startswith(start) for error in errors)
    assert [dirty for _, _, dirty in world.run(digest)] == [False] * 3


def test_members_that_drifted_apart_take_the_sources_values(ranks):
    world = world_of(ranks, 3)
    before = world.on(0, digest)
    world.on(1, drift_apart, "model/2.weight", 1e-6)
    world.on(2, drift_apart, "optimizer/state[0]/exp_avg", 4e-6)
    reports = world.run(share, drift=1e-4)
    assert {report.drifted for report in reports} == {"optimizer/state[0]/exp_avg"}
    assert len({report.drift for report in reports}) == 1 and 1e-6 < reports[0].drift < 1.6e-5
    assert assert_alike(world, 3) == before[0]
    assert {report.drifted for report in world.run(share, drift=1e-4)} == {""}


@pytest.mark.parametrize("by", [1e-2, float("nan")])
def test_members_that_are_further_apart_than_drift_are_told_so(ranks, by):
    world = world_of(ranks, 3)
    world.on(2, drift_apart, "model/0.weight", by)
    errors = world.run(failed_share, drift=1e-4)
    assert {error.type for error in errors} == {"DivergenceError"}
    assert all("model/0.weight: ranks [2]" in error.text for error in errors)
    assert all("of its norm, more than drift=0.0001" in error.text for error in errors)


def test_drift_is_for_floats_alone(ranks):
    world = world_of(ranks, 2)
    world.on(1, change_rate)
    errors = world.run(failed_share, drift=1e9)
    assert all("sync: optimizer/param_groups[0]/lr: ranks [1]" in error.text for error in errors)


@pytest.mark.parametrize("count", [1, 7, 1 << 14, (1 << 16) + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_sketches_tell_the_distance(count, dtype):
    torch.manual_seed(count)
    one = torch.randn(count, dtype=dtype)
    other = one + 0.1 * torch.randn(count, dtype=dtype)
    real = ((one - other).norm() / other.norm()).item()
    assert 0.4 * real < distance(sketch(one), sketch(other)) < 2.0 * real
    assert distance(sketch(one), sketch(one.clone())) == 0.0


def test_opposite_differences_in_two_places_do_not_cancel_out():
    one = torch.ones(1 << 15)
    other = one.clone()
    other[: 1 << 14] += 1e-3
    other[1 << 14 :] -= 1e-3
    assert distance(sketch(other), sketch(one)) > 1e-4


def test_divergence_of_plain_values_is_told(ranks):
    world = world_of(ranks, 2)
    world.on(1, change_rate)
    errors = world.run(failed_share)
    assert all("sync: optimizer/param_groups[0]/lr: ranks [1]" in error.text for error in errors)


def test_divergence_of_structure_is_told(ranks):
    world = world_of(ranks, 2)
    world.on(1, lose_optimizer_state)
    errors = world.run(failed_share)
    assert all("sync: optimizer/state[0]/step: ranks [1]" in error.text for error in errors)


def lose_optimizer_state() -> None:
    kept["state"].objects["optimizer"].state.clear()


def test_all_dirty_is_a_lost_state_on_all(ranks):
    world = world_of(ranks, 3)
    options = [{"dirty": True}, {"dirty": True}, {"continuing": False}]
    errors = run_each(world, failed_share, options)
    assert [error.type for error in errors] == ["StateLostError"] * 3
    assert "none of 3 members has a whole copy" in errors[0].text


def test_source_is_chosen_by_step_and_rank():
    def header(continuing: bool, dirty: bool, step: int) -> Header:
        return Header(continuing, dirty, step, LINEAGE, b"")

    new, old = (False, False), (True, False)
    assert choose_source([header(*new, 9), header(*old, 3), header(*old, 3)]) == 1
    assert choose_source([header(*new, 0), header(*new, 0)]) == 0
    assert choose_source([header(True, True, 9), header(*old, 3), header(*old, 4)]) == 2
    assert choose_source([header(False, True, 9), header(*new, 3)]) == 1
    for lost in ([header(True, True, 1), header(*new, 1)], [header(False, True, 0)]):
        with pytest.raises(StateLostError):
            choose_source(lost)


def test_other_objects_are_refused_on_all(ranks):
    world = world_of(ranks, 2)
    world.on(1, make_other_objects)
    errors = world.run(failed_share)
    assert [error.type for error in errors] == ["ElasticError"] * 2
    assert "the state of ranks [1] has other objects than ['model', 'optimizer'" in errors[0].text


def make_other_objects() -> None:
    kept["state"] = State(nn.Linear(1, 1))


# Tensors of every kind.


def make_tensors(full: bool) -> None:
    """Tensors of every dtype, shape and layout; zeros, or values."""
    made = {str(dtype): torch.zeros(7, dtype=dtype) for dtype in DTYPES}
    made |= {"empty": torch.zeros(0, 3), "scalar": torch.zeros(()), "one": torch.zeros(1, 1)}
    made |= {"transposed": torch.zeros(3, 5).t(), "strided": torch.zeros(9, 2)[::2]}
    made["last"] = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    if full:
        torch.manual_seed(0)
        for tensor in made.values():
            values = torch.randint(0, 2, tensor.shape)
            tensor.copy_(values.to(tensor.dtype))
    kept["state"] = State(tensors=made)


def test_tensors_of_every_dtype_and_layout_arrive(ranks):
    world = ranks.world(3)
    for rank in range(3):
        world.on(rank, make_tensors, rank == 1)
    before = world.on(1, digest)
    run_each(world, share, [{"dirty": True}, {}, {"continuing": False}])
    assert assert_alike(world, 0) == before[0]


def make_large(value: int) -> None:
    """More than one bucket; small tensors before and after."""
    sizes = [3, (33 << 20) + 1, 5]
    kept["state"] = State(many=[torch.full((n,), value, dtype=torch.uint8) for n in sizes])


def test_tensors_larger_than_a_bucket_arrive(ranks):
    world = ranks.world(2)
    for rank in range(2):
        world.on(rank, make_large, rank)
    reports = world.run(share, continuing=False)
    assert_alike(world, 0)
    assert [r.nbytes for r in reports] == [(33 << 20) + 9] * 2


def test_large_tensors_have_buckets_of_their_own_and_small_ones_share_them():
    sizes = {"a": 3, "b": 0, "c": 4, "d": 25, "e": 2, "f": 1}
    cut = list(buckets(sizes, 32))
    assert cut == [[("a", 0, 3)], [("c", 0, 4)], [("d", 0, 25)], [("e", 0, 2), ("f", 0, 1)]]
    assert list(buckets({"a": 25}, 10)) == [[("a", 0, 10)], [("a", 10, 20)], [("a", 20, 25)]]
    small = {str(number): 9 for number in range(20)}
    assert [len(bucket) for bucket in buckets(small, 80)] == [8, 8, 4]
    assert list(buckets({})) == []


# Failures in the middle.


def take_in_the_transfer(address: str):
    """The taker's end of it, which says that it has begun."""
    real, gates = _transfer.Transfer.run, connected_store(address)

    def run(self: _transfer.Transfer) -> object:
        gates.set("taking", "")
        return real(self)

    _transfer.Transfer.run = run
    try:
        return failed_share(continuing=False)
    finally:
        _transfer.Transfer.run = real


def abort_in_the_transfer(address: str, **options: bool):
    """The source's end of the transfer fails, once the taker is at it."""
    real, gates = _transfer.Transfer.run, connected_store(address)

    def strike(_: _transfer.Transfer) -> None:
        gates.wait(["taking"], seconds(PATIENCE))
        backend().abort("the test says so")
        dist.barrier()

    _transfer.Transfer.run = strike
    try:
        return failed_share(**options)
    finally:
        _transfer.Transfer.run = real


def state_is_dirty() -> bool:
    return kept["state"].dirty


def test_failed_transfer_leaves_only_the_taker_dirty_and_another_source_goes_on(ranks):
    world, gates = world_of(ranks, 3, newcomers=1), ranks.address()
    calls = [
        world.start(0, abort_in_the_transfer, gates),
        world.start(1, failed_share),
        world.start(2, take_in_the_transfer, gates),
    ]
    errors = [call.value() for call in calls]
    assert all("CommAbortedError" in errors[rank].kinds for rank in (0, 2))  # 1 has no part in it
    assert world.run(state_is_dirty) == [False, False, True]
    world = world.next([2, 1])
    reports = run_each(world, share, [{"continuing": False, "dirty": True}, {}])
    assert reports[0].source == 1
    assert_alike(world, 3)


def make_many(value: int) -> None:
    """Tensors of 1 MiB, so that each is a bucket of its own where buckets are as small."""
    kept["state"] = State(many=[torch.full((1 << 18,), float(value)) for _ in range(MANY)])


def share_in_small_buckets(fail_after: int = 0, **options: bool):
    """Buckets of 1 MiB; the group fails once this member has so many. What it raised, its sends."""
    real, passed, here = _wire.Wire.isend, [], []
    complete = _transfer._Arrival.complete

    def isend(self: _wire.Wire, buffer: torch.Tensor, to: int) -> dist.Work:
        passed.append(to)
        return real(self, buffer, to)

    def complete_some(self: _transfer._Arrival) -> None:
        complete(self)
        here.append(1)
        if len(here) == fail_after:
            backend().abort("the test says so")

    limit, _transfer.buckets.__defaults__ = _transfer.buckets.__defaults__, (1 << 20,)
    _wire.Wire.isend, _transfer._Arrival.complete = isend, complete_some
    try:
        error = failure_of(lambda: kept.update(report=share(**options)))
        return (error and error.type, len(passed))
    finally:
        _wire.Wire.isend, _transfer._Arrival.complete = real, complete
        _transfer.buckets.__defaults__ = limit


def report() -> SyncReport:
    return kept["report"]


def test_two_newcomers_take_along_a_pipeline(ranks):
    world = ranks.world(4)
    for rank in range(4):
        world.on(rank, make_many, 7 if rank < 2 else rank)
    found = run_each(world, share_in_small_buckets, [{}, {}, COLD, COLD])
    # Rank 0 sends each bucket once, rank 2 passes it on; rank 1 lacks nothing, and has no part.
    assert found == [(None, MANY), (None, 0), (None, MANY), (None, 0)]
    assert world.on(0, report).took == (2, 3)
    assert_alike(world, 0)


def test_another_source_goes_on_with_what_has_not_arrived(ranks):
    world = ranks.world(4)
    for rank in range(4):
        world.on(rank, make_many, 7 if rank < 2 else rank)
    found = run_each(world, share_in_small_buckets, [{}, {}, COLD, {"fail_after": 3} | COLD])
    assert [found[rank][0] for rank in (2, 3)] == ["CommAbortedError"] * 2
    world = world.next([1, 2, 3])
    warm = {"continuing": False, "dirty": True}
    lineages = [world.on(rank, lineage_of_state) for rank in (1, 2)]
    assert lineages == [LINEAGE] * 2  # so that steps() has it compared
    run_each(world, share_in_small_buckets, [{}, warm, warm])
    assert 3 <= world.on(0, report).tensors <= MANY - 3  # some were under way
    assert_alike(world, 0)


def lineage_of_state() -> bytes:
    return kept["state"].lineage


def test_leaf_that_cannot_travel_is_refused_before_anything_is_sent(ranks):
    world = world_of(ranks, 2)
    world.run(hold_an_object)
    errors = world.run(failed_share)
    assert [error.type for error in errors] == ["TypeError"] * 2
    assert errors[0].text.startswith("scheduler/odd: a state has None, bool")


def hold_an_object() -> None:
    kept["state"].objects["scheduler"].odd = object()


def test_load_that_does_not_take_the_state_whole_is_told(ranks):
    world = ranks.world(2)
    world.run(make_forgetful)
    calls = [world.start(rank, failed_share, continuing=rank == 0) for rank in range(2)]
    errors = [call.value() for call in calls]
    assert errors[0] is None
    assert "sync: forgetful: load_state_dict() did not take" in errors[1].text


class Forgetful:
    def state_dict(self) -> dict[str, int]:
        return {"rank": dist.get_rank()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        pass


def make_forgetful() -> None:
    kept["state"] = State(Forgetful())
