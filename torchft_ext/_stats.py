"""What `Backend.stats()` returns, and what metrics() reads."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class Stats(TypedDict):
    """Counts since the group was made; threads and descriptors are the whole process's.

    Keys:
        generations: that became active.
        failed_configures: that did not.
        operations: issued.
        bytes_sent, bytes_received: by the engine for this group.
        failures: number by kind: "peer_lost", "timeout" ...
        waited_for: seconds that operations here have waited for a rank of this generation, by rank;
            of the operations on host memory that waited for longer than Options.ask_after. Waits
            for several ranks count for each of them.
        last_error: the last failure's message.
        last_configure_ms: milliseconds of each phase of the last configure(): "end_previous",
            "rendezvous", "connections"; of one that failed, up to the phase in which it did.
        threads: names of the library's running threads.
        stuck_threads: those that were given up because they did not end.
        descriptors: open in the process, those that single threads of the library have to
            themselves included.
        counters: the engine's own.
        monitor: the peer monitor's counters; None where the engine has none.
        engine: "host" or, where a group has no other, "nccl".
    """

    generations: int
    failed_configures: int
    operations: int
    bytes_sent: int
    bytes_received: int
    failures: dict[str, int]
    waited_for: dict[int, float]
    last_error: str | None
    last_configure_ms: dict[str, float]
    threads: list[str]
    stuck_threads: int
    descriptors: int
    counters: dict[str, int]
    monitor: dict[str, int] | None
    engine: str


class GroupFields(TypedDict):
    """Of one group, for metrics(): as Stats, in seconds. Without an engine it has no counters.

    Keys:
        name: of the group.
        generation, rank, size: of its last generation.
        failed: that one has failed, or the last attempt at one.
        operations: issued, by kind.
        last_configure_seconds: of each phase of the last configure().
    """

    name: str
    generation: int
    rank: int
    size: int
    failed: bool
    generations: int
    failed_configures: int
    operations: dict[str, int]
    bytes_sent: int
    bytes_received: int
    failures: dict[str, int]
    waited_for: dict[int, float]
    last_configure_seconds: dict[str, float]
    counters: NotRequired[dict[str, int]]
    monitor: NotRequired[dict[str, int] | None]
    engine: NotRequired[str]
