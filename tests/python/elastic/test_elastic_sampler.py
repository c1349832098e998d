"""torchft_ext.elastic.BatchSampler: no sample of a committed step is missed or taken twice."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torchft_ext.elastic._sampler import BatchSampler


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Noise(Numbers):
    """Sample i is i and a random number of the worker's."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


def world_of(size: int, *, position: int = 0, **options) -> list[BatchSampler]:
    """One sampler for each rank, of 20 samples, 3 for each rank and step."""
    samplers = [BatchSampler(20, 3, seed=7, **options) for _ in range(size)]
    for rank, sampler in enumerate(samplers):
        state = sampler.state_dict()
        sampler.load_state_dict({**state, "position": position})
        sampler.follow(rank, size)
    return samplers


def commit_step(samplers: list[BatchSampler]) -> list[int]:
    """The step's global batch."""
    batch = [index for sampler in samplers for index in sampler.indices()]
    for sampler in samplers:
        sampler.commit()
    return batch


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_sample_is_taken_once_in_each_pass(size):
    samplers = world_of(size)
    taken = [index for _ in range(20) for index in commit_step(samplers)]
    for start in range(0, len(taken) - 19, 20):
        assert sorted(taken[start : start + 20]) == list(range(20))
    assert taken[:20] != taken[20:40]


def test_changes_of_the_world_neither_miss_nor_repeat_a_sample():
    taken, position = [], 0
    for size in (4, 3, 1, 5, 2, 8, 3):
        samplers = world_of(size, position=position)
        taken += commit_step(samplers) + commit_step(samplers)
        position = samplers[0].position
    whole = len(taken) // 20
    assert position == len(taken) and whole >= 7
    assert set(Counter(taken[: whole * 20]).values()) == {whole}


def test_order_does_not_depend_on_the_world():
    alone, many = world_of(1), world_of(4)
    one_by_one = [index for _ in range(4) for index in commit_step(alone)]
    assert commit_step(many) == one_by_one


def test_cursor_moves_by_commit_only():
    (sampler,) = world_of(1)
    first = sampler.indices()
    for _ in range(10):
        next(iter(sampler))
    sampler.rewind()
    assert sampler.indices() == first and sampler.position == 0
    sampler.commit()
    assert (sampler.position, sampler.cursor, sampler.pass_) == (3, 3, 0)
    assert sampler.indices() != first


def test_iterating_gives_the_batches_of_successive_steps():
    samplers = world_of(3, position=5)
    for rank, sampler in enumerate(samplers):
        fellows, ahead = world_of(3, position=5), iter(sampler)
        for _ in range(10):
            assert next(ahead) == fellows[rank].indices()
            commit_step(fellows)


def test_passes_and_length_are_counted():
    samplers = world_of(2)
    assert len(samplers[0]) == 4  # 20 samples, 6 for each step
    for _ in range(4):
        commit_step(samplers)
    assert (samplers[0].pass_, samplers[0].epoch, samplers[0].cursor) == (1, 1, 4)


def test_seeds_and_order():
    def first(**options):
        return BatchSampler(1000, 8, **options).indices()

    assert first(seed=1) == first(seed=1) != first(seed=2)
    assert first(shuffle=False) == list(range(8))


def test_batches_larger_than_the_data_run_through_several_passes():
    sampler = BatchSampler(3, 8)
    assert sorted(Counter(sampler.indices()).values()) == [2, 3, 3]


def test_global_random_state_is_left_alone():
    before = torch.random.get_rng_state()
    sampler = BatchSampler(Numbers(20), 3)
    sampler.indices()
    next(sampler.loader())
    assert torch.equal(before, torch.random.get_rng_state())


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        BatchSampler(0, 1)
    with pytest.raises(ValueError, match="batch_size: expected at least 1, found 0"):
        BatchSampler(1, 0)
    with pytest.raises(ValueError, match="micro_batches: expected at least 1, found 0"):
        BatchSampler(1, 1, micro_batches=0)
    with pytest.raises(ValueError, match="rank: expected 0 to 1, found 2"):
        BatchSampler(1, 1).follow(2, 2)
    with pytest.raises(ValueError, match="expected the state of 3 samples, found that of 4"):
        BatchSampler(3, 1).load_state_dict(BatchSampler(4, 1).state_dict())
    with pytest.raises(TypeError, match="shuffle: the sampler decides that"):
        BatchSampler(Numbers(3), 1).loader(shuffle=True)
    with pytest.raises(TypeError, match="dataset: the sampler knows only its length"):
        BatchSampler(3, 1).loader()


def test_dataloader_takes_it_as_a_batch_sampler():
    sampler = BatchSampler(Numbers(20), 3)
    ahead = iter(DataLoader(sampler.data_source, batch_sampler=sampler))
    for _ in range(10):
        assert next(ahead).tolist() == sampler.indices()
        sampler.commit()


@pytest.fixture(params=[0, 2], ids=["no workers", "two workers"])
def followed(request):
    """A sampler and its loader."""
    sampler = BatchSampler(Numbers(50), 3, seed=3)
    return sampler, sampler.loader(num_workers=request.param)


def test_loader_gives_the_uncommitted_steps_batch(followed):
    sampler, batches = followed
    for _ in range(8):
        batch = next(batches)
        assert batch.tolist() == sampler.indices()
        with pytest.raises(RuntimeError, match="micro_batches=n"):
            next(batches)
        sampler.commit()


@pytest.fixture(params=[0, 2], ids=["no workers", "two workers"])
def accumulating(request):
    """Samplers of two ranks that take four batches in a step, and their loaders."""
    samplers = [BatchSampler(Numbers(50), 3, micro_batches=4, seed=3) for _ in range(2)]
    for rank, sampler in enumerate(samplers):
        sampler.follow(rank, 2)
    return samplers, [sampler.loader(num_workers=request.param) for sampler in samplers]


def take_step(loaders) -> list[int]:
    return [index for loader in loaders for _ in range(4) for index in next(loader).tolist()]


def test_micro_batches_are_the_steps_samples(accumulating):
    samplers, loaders = accumulating
    taken = []
    for number in range(10):
        given = take_step(loaders)
        assert given == [index for sampler in samplers for index in sampler.indices()]
        if number % 3 == 1:  # the step is repeated
            for sampler in samplers:
                sampler.rewind()
            assert take_step(loaders) == given
        for sampler in samplers:
            sampler.check_given()
            sampler.commit()
        taken += given
    assert samplers[0].position == len(taken) == 10 * 2 * 4 * 3
    assert sorted(taken[:50]) == sorted(taken[50:100]) == list(range(50))


def test_step_has_no_more_micro_batches_than_it_has(accumulating):
    samplers, loaders = accumulating
    take_step(loaders)
    with pytest.raises(RuntimeError, match="have been taken, 4"):
        next(loaders[0])
    samplers[0].commit()
    assert next(loaders[0]).tolist() == samplers[0].indices()[:3]


def test_step_that_took_some_of_its_micro_batches_is_no_step(accumulating):
    samplers, loaders = accumulating
    samplers[0].check_given()  # it took none: it has another source of data
    next(loaders[0])
    with pytest.raises(RuntimeError, match="took 1 of its 4 micro-batches"):
        samplers[0].check_given()
    samplers[0].rewind()
    samplers[0].check_given()


def test_micro_batches_may_change_between_steps(accumulating):
    samplers, loaders = accumulating
    take_step(loaders)
    for sampler in samplers:
        sampler.commit()
        sampler.micro_batches = 2
    assert samplers[0].global_batch_size == 2 * 2 * 3
    assert next(loaders[1]).tolist() + next(loaders[1]).tolist() == samplers[1].indices()


def test_loader_throws_prefetched_batches_away(followed):
    sampler, batches = followed
    changes = [
        lambda: sampler.follow(1, 3),
        sampler.rewind,
        lambda: sampler.follow(0, 2),
        lambda: sampler.load_state_dict({**sampler.state_dict(), "position": 77}),
        sampler.commit,  # of a step that took no batch
    ]
    for change in changes:
        for _ in range(2):
            assert next(batches).tolist() == sampler.indices()
            sampler.commit()
        next(batches)
        change()
        assert next(batches).tolist() == sampler.indices()
        sampler.commit()


def test_loader_follows_a_step_that_took_no_batch(followed):
    sampler, batches = followed
    next(batches)
    sampler.commit()
    sampler.commit()
    assert next(batches).tolist() == sampler.indices()


def test_workers_live_on_through_resets():
    sampler = BatchSampler(Numbers(50), 3)
    batches = sampler.loader(num_workers=1)
    next(batches)
    (worker,) = batches._batches._workers
    sampler.rewind()
    next(batches)
    assert [other.pid for other in batches._batches._workers] == [worker.pid]


def test_ranks_draw_different_random_numbers_in_their_workers():
    def draws(rank: int) -> list[float]:
        sampler = BatchSampler(Noise(50), 3)
        sampler.follow(rank, 2)
        return next(sampler.loader(num_workers=1))[1].tolist()

    assert draws(0) == draws(0) != draws(1)
