"""Worlds of rank processes with an accelerator; a pool of their own, since the simulator stays in a
process that has loaded it, and a context on a GPU costs memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import device_side
import pytest
from device_side import accelerator
from ranks import START_PATIENCE, Pool, Worker, World, values_of

SPARES = 0 if accelerator.simulated() else 2  # a rank's start takes seconds on a GPU


def device_environment(rank_env: dict[str, str]) -> dict[str, str]:
    return {**rank_env, **accelerator.environment(), "TORCHFT_EXT_TEST_WARM_UP": "1"}


class DevicePool:
    """Lends worlds whose default group serves the device."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def world(
        self, size: int, *, workers: Sequence[Worker] | None = None, **options: object
    ) -> World:
        chosen = self.pool.borrow(size) if workers is None else list(workers)
        address = self.pool.address()
        calls = [
            worker.call(device_side.join, (address, rank, size), options)
            for rank, worker in enumerate(chosen)
        ]
        values_of(calls, START_PATIENCE)
        return World(self.pool, chosen)

    def made_by_init(self, spec: str, address: str, workers: Sequence[Worker]) -> World:
        """A world whose default group was made by init_process_group just now."""
        calls = [
            worker.call(device_side.init, (spec, address, rank, len(workers)), {})
            for rank, worker in enumerate(workers)
        ]
        values_of(calls, START_PATIENCE)
        return World(self.pool, list(workers))

    def start_spare(self) -> None:
        """Have a new rank ready when the next world needs one; returns at once."""
        self.pool.start_spare()

    def next(self, world: World, ranks: Sequence[int], **options: object) -> World:
        return self.world(len(ranks), workers=[world.workers[rank] for rank in ranks], **options)


@pytest.fixture(scope="session")
def device_pool(
    tmp_path_factory: pytest.TempPathFactory, rank_env: dict[str, str]
) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("device_ranks"), device_environment(rank_env), SPARES)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def non_blocking_pool(
    tmp_path_factory: pytest.TempPathFactory, rank_env: dict[str, str]
) -> Iterator[Pool]:
    environment = {**device_environment(rank_env), "TORCHFT_EXT_NCCL_BLOCKING": "0"}
    pool = Pool(tmp_path_factory.mktemp("non_blocking_ranks"), environment, SPARES)
    yield pool
    pool.close()


# For tests of `devices`, each of which then runs with either kind of communicators. Blocking ones
# are what there is by default.
BOTH_KINDS = pytest.mark.parametrize("devices", ("non_blocking", "blocking"), indirect=True)


@pytest.fixture
def devices(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    """The pool; whatever a test did to its workers is made good after it."""
    otherwise = getattr(request, "param", "") == "non_blocking"
    pool: Pool = request.getfixturevalue("non_blocking_pool" if otherwise else "device_pool")
    yield DevicePool(pool)
    pool.discard_unusable()
