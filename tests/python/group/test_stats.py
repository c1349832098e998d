"""stats(): phases, threads, descriptors and failed attempts are told as they are."""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed as dist
from rankside import (
    abort,
    all_stats,
    backend,
    configure,
    failure_of,
    wait_errored,
    wait_until,
)
from tasks import thread_names
from values import check_sum

PHASES = ["end_previous", "rendezvous", "connections"]
LATE = 0.2  # seconds that a member comes after the others
FILES = 50
LOOKS = 300
MARGIN = 6  # connections of the last generation may close meanwhile; a table has more


def own_threads() -> set[str]:
    """The library's, as the kernel names them."""
    return {name for name in thread_names().values() if name.startswith("ft-")}


def test_stats_tell_threads_and_failures(ranks):
    world = ranks.world(2)
    world.on(0, abort, "for the record")
    stats = world.on(0, all_stats)
    assert stats["engine"] == "host" and stats["stuck_threads"] == 0
    assert set(stats["threads"]) == world.on(0, own_threads)
    assert stats["generations"] >= 1
    assert "for the record" in stats["last_error"]


def timed_configure(address: str, rank: int) -> tuple[float, dict[str, float]]:
    """Milliseconds that it took, and those of its phases."""
    began = time.monotonic()
    configure(address, rank, 2)
    took = (time.monotonic() - began) * 1000
    return took, backend().stats()["last_configure_ms"]


def test_phases_of_the_last_configure_tell_where_its_time_went(ranks):
    world, address = ranks.world(2), ranks.address()
    early = world.start(0, timed_configure, address, 0)
    ranks.await_key(address, "0")
    time.sleep(LATE)
    late = world.start(1, timed_configure, address, 1)
    for took, phases in (early.value(), late.value()):
        assert list(phases) == PHASES and all(part >= 0 for part in phases.values()), phases
        assert 0 < sum(phases.values()) <= took, (phases, took)
    assert early.value()[1]["rendezvous"] >= LATE * 1000, early.value()


def configure_nowhere() -> dict[str, tuple[int, int]]:
    """Counts before and after an attempt that fails in its rendezvous."""
    before = backend().stats()
    assert failure_of(lambda: configure("127.0.0.1:1/nowhere", 0, 1)).type == "StoreLostError"
    after = backend().stats()
    assert list(after["last_configure_ms"]) == PHASES[:2], after
    return {name: (before[name], after[name]) for name in ("generations", "failed_configures")}


def test_failed_configure_counts_as_such_and_as_no_generation(ranks):
    world = ranks.world(2)
    counts = world.on(0, configure_nowhere)
    assert counts["failed_configures"][1] == counts["failed_configures"][0] + 1
    assert counts["generations"][1] == counts["generations"][0]
    world = world.next()
    after = world.on(0, all_stats)
    assert after["failed_configures"] == counts["failed_configures"][1]
    assert after["generations"] == counts["generations"][1] + 1
    world.run(check_sum)


def descriptors_follow_open_files() -> None:
    def counted() -> bool:
        """Connections of the last generations may close meanwhile."""
        before = backend().stats()["descriptors"]
        files = [open("/dev/null") for _ in range(FILES)]
        during = backend().stats()["descriptors"]
        for file in files:
            file.close()
        return before > 0 and during == before + FILES

    dist.barrier()
    wait_until(counted, f"{FILES} descriptors more for {FILES} open files")


def descriptors_while_others_open_and_close() -> list[int]:
    """What is counted while another thread opens one and closes it, again and again."""
    over = threading.Event()

    def open_and_close() -> None:
        while not over.is_set():
            os.close(os.open("/dev/null", os.O_RDONLY))

    thread = threading.Thread(target=open_and_close)
    thread.start()
    counts = [backend().stats()["descriptors"] for _ in range(LOOKS)]
    over.set()
    thread.join()
    return counts


def test_descriptor_that_comes_and_goes_counts_for_one(ranks):
    world = ranks.world(1)
    world.on(0, check_sum)
    counts = world.on(0, descriptors_while_others_open_and_close)
    assert max(counts) - min(counts) <= MARGIN, counts


def test_stats_count_the_open_descriptors_of_the_process(ranks):
    ranks.world(2).run(descriptors_follow_open_files)


def type_of_error() -> str:
    return str(dist.group.WORLD._get_backend(torch.device("cpu")).get_error().name)


def test_get_error_gives_torchs_types_of_errors(ranks):
    world = ranks.world(2)
    assert world.run(type_of_error) == ["SUCCESS", "SUCCESS"]
    world.on(0, abort, "enough")
    world.on(1, wait_errored)
    assert world.run(type_of_error) == ["COMM_ERROR", "COMM_ERROR"]
    world = world.next()
    world.kill(1)
    world.on(0, wait_errored)
    assert world.on(0, type_of_error) == "REMOTE_ERROR"
    world.start(0, configure, ranks.address(), 0, 2, 1.0).error("CommTimeoutError")
    assert world.on(0, type_of_error) == "TIMEOUT"
