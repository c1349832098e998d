"""A size that is wrong is refused, or costs its limit and little memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from rankside import seconds
from timing import assert_within

import torchft_ext
from torchft_ext import CommTimeoutError
from torchft_ext import process_group as pgs

MOST = 65536
LIMIT = 0.2  # seconds
LATE = 0.5  # seconds more; what it takes to say so
LITTLE = 20 << 20  # bytes


@pytest.mark.parametrize("size", [MOST + 1, 10_000_000, 2_000_000_000])
@pytest.mark.parametrize("kind", ["Host", "Gloo", "BabyHost"])
def test_sizes_that_no_group_can_have_are_refused(store, kind, size):
    group = getattr(pgs, f"ProcessGroup{kind}")(timeout=LIMIT)
    with pytest.raises(ValueError, match=f"world_size: expected at most {MOST}, found {size}"):
        group.configure(f"127.0.0.1:{store.port}/{kind}", 0, size)
    with pytest.raises(ValueError, match=f"world_size: expected at most {MOST}, found {size}"):
        torchft_ext.make_group(store, 0, size, timeout=seconds(LIMIT))
    group.shutdown()


@pytest.mark.parametrize("kind", ["Host", "Gloo", "BabyHost"])
def test_generation_goes_on_after_a_configure_that_was_refused(store, kind):
    group = getattr(pgs, f"ProcessGroup{kind}")(timeout=20.0)
    place = f"127.0.0.1:{store.port}"
    group.configure(f"{place}/{kind}", 0, 1)
    for address, rank, size in (
        (f"{place}/other", 0, MOST + 1),
        (f"{place}/other", 0, 0),
        (f"{place}/other", 1, 1),
        (f"{place}/other", -1, 1),
        (place, 0, 1),
    ):
        with pytest.raises(ValueError, match=r"configure: (world_size|rank|store_addr): exp"):
            group.configure(address, rank, size)
        assert group.errored() is None
        assert group.allreduce([torch.ones(1)]).wait()
    group.shutdown()


def peak() -> int:
    """The most memory that this process has had since forget_peak(), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (one for one in lines if one.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def test_members_that_never_come_cost_the_limit_and_little_memory(store):
    group = pgs.ProcessGroupHost(timeout=LIMIT)
    group.configure(f"127.0.0.1:{store.port}/alone", 0, 1)
    numbers = iter(range(100))

    def attempt() -> list[float]:
        forget_peak()
        before, began = peak(), time.monotonic()
        with pytest.raises(CommTimeoutError, match=r"ranks 1, 2, .* did not come"):
            group.configure(f"127.0.0.1:{store.port}/{next(numbers)}", 0, MOST)
        took = time.monotonic() - began
        assert peak() - before < LITTLE
        return [took]

    assert_within(LIMIT + LATE, attempt)
    group.configure(f"127.0.0.1:{store.port}/again", 0, 1)
    group.shutdown()


def test_store_is_free_again_soon_after_a_size_that_was_wrong(store):
    group = pgs.ProcessGroupHost(timeout=LIMIT)
    with pytest.raises(CommTimeoutError):
        group.configure(f"127.0.0.1:{store.port}/wrong", 0, MOST)
    group.set_timeout(seconds(30.0))

    def attempt() -> list[float]:
        began = time.monotonic()
        group.configure(f"127.0.0.1:{store.port}/right{began}", 0, 1)
        return [time.monotonic() - began]

    assert_within(LATE, attempt)
    group.shutdown()
