"""Worlds of rank processes with a simulated accelerator; a pool of their own, since the simulator
stays in a process that has loaded it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import device_side
import pytest
from ranks import START_PATIENCE, Pool, Worker, World, values_of

SIM = Path(__file__).resolve().parents[1] / "sim"


def device_environment(rank_env: dict[str, str]) -> dict[str, str]:
    env = {**rank_env, "PYTHONPATH": os.pathsep.join([rank_env["PYTHONPATH"], str(SIM)])}
    for name in ("TORCHFT_EXT_SIM_LIB", "TORCHFT_EXT_BUILD_ROOT"):
        if name in os.environ:
            env[name] = os.environ[name]
    return env


class DevicePool:
    """Lends worlds whose default group serves the simulated device."""

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

    def next(self, world: World, ranks: Sequence[int], **options: object) -> World:
        return self.world(len(ranks), workers=[world.workers[rank] for rank in ranks], **options)


@pytest.fixture(scope="session")
def device_pool(
    tmp_path_factory: pytest.TempPathFactory, rank_env: dict[str, str]
) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("device_ranks"), device_environment(rank_env))
    yield pool
    pool.close()


@pytest.fixture
def devices(device_pool: Pool) -> Iterator[DevicePool]:
    """The pool; whatever a test did to its workers is made good after it."""
    yield DevicePool(device_pool)
    device_pool.discard_unusable()
