"""What runs inside the rank processes: joining groups, describing errors, awaiting conditions."""

from __future__ import annotations

import datetime
import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

# Seconds; for anything that takes milliseconds on an idle machine.
PATIENCE = float(os.environ.get("TORCHFT_EXT_TEST_PATIENCE", 60))
OPERATION_LIMIT = 40.0  # seconds; the timeout of groups
kept: dict[str, object] = {}  # objects that outlive one call: models, works, buffers
_group_made_for: tuple[object, ...] | None = None


@dataclass
class ErrorInfo:
    """An exception as it was seen in a rank; plain data, so that it crosses processes."""

    at: float  # time.monotonic(), one clock for all processes of a host
    type: str
    kinds: tuple[str, ...]  # the names of all its classes
    text: str
    traceback: str
    fields: dict[str, object] = field(default_factory=dict)  # CommError's attributes, in seconds
    cause: dict[str, object] | None = None


def describe(error: BaseException) -> ErrorInfo:
    info = ErrorInfo(
        at=time.monotonic(),
        type=type(error).__name__,
        kinds=tuple(kind.__name__ for kind in type(error).__mro__),
        text=str(error),
        traceback="".join(traceback.format_exception(error)),
    )
    for name in ("generation", "rank", "size", "op", "seq", "elapsed", "limit"):
        value = getattr(error, name, None)
        if isinstance(value, datetime.timedelta):
            value = value.total_seconds()
        info.fields[name] = value
    cause = getattr(error, "cause", None)
    if cause is not None:
        names = ("rank", "other_rank", "host", "pid", "how")
        info.cause = {name: getattr(cause, name) for name in names}
    return info


def failure_of(action: Callable[[], object]) -> ErrorInfo | None:
    """What the action raised, or None."""
    try:
        action()
    except Exception as error:
        return describe(error)
    return None


def wait_until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    limit = time.monotonic() + patience
    while not condition():
        if time.monotonic() > limit:
            raise AssertionError(f"{what}: not within {patience} s")
        time.sleep(0.005)


def seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


def backend():
    import torchft_ext

    return torchft_ext.backend()


def configure(address: str, rank: int, size: int, limit: float = PATIENCE) -> None:
    backend().configure(address, rank, size, timeout=seconds(limit))


def configure_next(address: str, rank: int, size: int) -> None:
    """Begin a generation though the end of the last test may have killed a member of the last one.

    A death that was not known yet is told once, by the first configure() after it.
    """
    import torchft_ext

    for tries_left in (2, 1, 0):
        try:
            return torchft_ext.backend().configure(address, rank, size)
        except torchft_ext.PeerLostError as error:
            if tries_left == 0 or "before it came to the new generation" not in str(error):
                raise


def join(address: str, rank: int, size: int, **options: object) -> None:
    """Begin a generation of the long-lived default group; made anew when the options differ."""
    import torchft_ext

    global _group_made_for
    key = ("shared", *sorted(options.items()))
    if _group_made_for != key:
        leave_default_group()
        dist.init_process_group(
            "ft",
            store=connected_store(address, f"alone/{os.getpid()}/{time.monotonic()}"),
            rank=0,
            world_size=1,
            timeout=seconds(OPERATION_LIMIT),
            pg_options=torchft_ext.Options(**options) if options else None,
        )
        _group_made_for = key
    torchft_ext.backend().set_timeout(seconds(OPERATION_LIMIT))
    configure_next(address, rank, size)


def init_fresh(address: str, rank: int, size: int, backend_name: str = "ft") -> None:
    """Make a new default group by init_process_group, whose first generation has this world."""
    leave_default_group()
    dist.init_process_group(
        backend_name,
        store=connected_store(address),
        rank=rank,
        world_size=size,
        timeout=seconds(OPERATION_LIMIT),
    )


def connected_store(address: str, prefix: str = "") -> dist.Store:
    """A client of its own of the store at host:port/prefix."""
    place, own_prefix = address.split("/", 1)
    host, port = place.rsplit(":", 1)
    client = dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=seconds(PATIENCE))
    return dist.PrefixStore(prefix or own_prefix, client)


def leave_default_group() -> None:
    global _group_made_for
    _group_made_for = None
    kept.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    # A failed init_process_group() has used up a name, which would differ from the other ranks'.
    dist.distributed_c10d._world.group_count = 0


def operations() -> int:
    return backend().stats()["operations"]


def wait_for_operation_after(count: int) -> None:
    wait_until(lambda: operations() > count, f"an operation after the first {count}")


def all_stats() -> dict[str, object]:
    return backend().stats()


def errored() -> ErrorInfo | None:
    error = backend().errored()
    return None if error is None else describe(error)


def wait_errored() -> ErrorInfo:
    wait_until(lambda: backend().errored() is not None, "the generation's failure")
    return describe(backend().errored())


def abort(why: str = "the test says so") -> tuple[float, float]:
    """When it was called, and when it had returned."""
    began = time.monotonic()
    backend().abort(why)
    return began, time.monotonic()


def abort_from_many_threads(count: int) -> tuple[float, float]:
    """At the same moment, each with a reason of its own; when it began, and all had returned."""
    began = time.monotonic()
    start = threading.Barrier(count)

    def strike(number: int) -> None:
        start.wait(PATIENCE)
        abort(f"striker {number}")

    with ThreadPoolExecutor(count) as strikers:
        for done in [strikers.submit(strike, number) for number in range(count)]:
            done.result(PATIENCE)
    return began, time.monotonic()


def process_id() -> int:
    return os.getpid()


def main_thread_waits_in_c() -> None:
    """Return once the main thread sleeps and nothing wakes it, as waiting for the GIL would."""
    path = Path(f"/proc/self/task/{os.getpid()}/status")

    def activity() -> list[str]:
        lines = path.read_text().splitlines()
        return [line for line in lines if line.startswith(("State", "voluntary", "nonvoluntary"))]

    def asleep() -> bool:
        before = activity()
        # Below the 10 ms after which our own waits look round; beyond the 5 of waits for the GIL.
        time.sleep(0.007)
        return before[0].endswith("S (sleeping)") and before == activity()

    wait_until(asleep, "the main thread's sleep")
