"""What `Backend.stats()` returns, and what metrics() reads."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class Stats(TypedDict):
    """Counts since the group was made; threads and descriptors are the whole process's.

    Keys:
        generations: the number that became active.
        failed_configures: the number of configure() calls that failed.
        operations: the number issued.
        bytes_sent, bytes_received: by the engine for this group.
        failures: the number by kind: "peer_lost", "timeout" ...
        waited_for: by rank of this generation, the seconds for which operations of this process
            have waited for that rank. Only operations on host memory count that waited for longer
            than Options.ask_after. A wait for several ranks counts for each of them.
        why_over_sockets: why collectives on host memory of this generation run over sockets and
            not in shared memory, such as "rank 1 is on another host"; None: they do not.
        last_error: the last failure's message.
        last_configure_ms: milliseconds of each phase of the last configure(): "end_previous",
            "rendezvous", "connections"; of one that failed, up to the phase in which it did.
        threads: names of the library's running threads.
        stuck_threads: the number of threads that did not end and were abandoned.
        descriptors: the number open in the process, including those in private tables of the
            library's threads.
        counters: the engine's own. "shared_generations" counts the generations whose collectives
            run in shared memory, and "shared_plans" is the digest of the table of plans for them.
            "shared_line", "shared_once", "shared_slices" and "shared_chunks" count what each plan
            has run.
        monitor: the peer monitor's counters; None if the engine has none.
        engine: "host", or "nccl" if the group has no other engine.
    """

    generations: int
    failed_configures: int
    operations: int
    bytes_sent: int
    bytes_received: int
    failures: dict[str, int]
    waited_for: dict[int, float]
    why_over_sockets: str | None
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
        shut_down: its life is over, and somebody still holds it.
        operations: issued, by kind.
        operation_bytes: of the larger side of each, inputs or outputs, by kind.
        operation_seconds: from issue to end, of those that have ended, by kind.
        last_configure_seconds: of each phase of the last configure().
    """

    name: str
    generation: int
    rank: int
    size: int
    failed: bool
    shut_down: bool
    generations: int
    failed_configures: int
    operations: dict[str, int]
    operation_bytes: dict[str, int]
    operation_seconds: dict[str, float]
    bytes_sent: int
    bytes_received: int
    failures: dict[str, int]
    waited_for: dict[int, float]
    last_configure_seconds: dict[str, float]
    counters: NotRequired[dict[str, int]]
    monitor: NotRequired[dict[str, int] | None]
    engine: NotRequired[str]
