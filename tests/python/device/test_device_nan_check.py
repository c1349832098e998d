"""Options(nan_check=True) on a device: a NaN that a rank brings in is told to all."""

from __future__ import annotations

import pytest
import test_nan_check
from device_side import device
from rankside import backend, wait_until

NAN = float("nan")


def run(name: str, value: float) -> None:
    test_nan_check.run(name, value, str(device()))
    backend().check()


def run_until_told(name: str, value: float) -> None:
    """The other rank finds it once its own operation is through: the result may be here by then."""
    run(name, value)
    wait_until(lambda: backend().errored() is not None, "the end of the generation")
    backend().check()


@pytest.mark.parametrize("name", test_nan_check.OPERATIONS)
def test_nan_on_a_device_is_told_to_all_who_name_its_rank(devices, name):
    world = devices.world(2, nan_check=True)
    world.run(run, name, 1.0)
    test_nan_check.expect_told(
        [world.start(0, run_until_told, name, 1.0), world.start(1, run, name, NAN)]
    )
    devices.next(world, range(2), nan_check=True).run(run, name, 1.0)
