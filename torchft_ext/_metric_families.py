"""The metrics by name, and what each counts. docs/reference/metrics.md has a table of them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAMILIES", "PREFIX", "Family"]

PREFIX = "torchft_ext_"
_GROUP = ("group", "engine")


@dataclass(frozen=True)
class Family:
    """One metric in all its series.

    Attributes:
        name: without PREFIX; its unit is in it, and "_total" in that of a counter.
        kind: "counter" or "gauge".
        help: one line.
        labels: of each series, in this order.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


FAMILIES = (
    Family("build_info", "gauge", "Always 1; the versions are labels.", ("version", "torch")),
    # Groups.
    Family("operations_total", "counter", "Operations issued, by kind.", (*_GROUP, "operation")),
    Family(
        "operation_bytes_total",
        "counter",
        "Bytes of the operations' tensors, of the larger side of each: inputs or outputs.",
        (*_GROUP, "operation"),
    ),
    Family(
        "operation_seconds_total",
        "counter",
        "Time from issue to completion of operations that have ended.",
        (*_GROUP, "operation"),
    ),
    Family("sent_bytes_total", "counter", "Bytes sent for the group.", _GROUP),
    Family("received_bytes_total", "counter", "Bytes received for the group.", _GROUP),
    Family("failures_total", "counter", "Generations that failed, by cause.", (*_GROUP, "cause")),
    Family("generations_total", "counter", "Generations that became active.", _GROUP),
    Family("failed_configures_total", "counter", "configure() calls that failed.", _GROUP),
    Family("generation", "gauge", "Number of the last generation; 0: none yet.", _GROUP),
    Family("group_size", "gauge", "World size of the last generation.", _GROUP),
    Family("group_rank", "gauge", "This process's rank in the last generation.", _GROUP),
    Family("group_failed", "gauge", "1 if the generation has failed, else 0.", _GROUP),
    Family(
        "configure_seconds",
        "gauge",
        "How long each phase of the last configure() took.",
        (*_GROUP, "phase"),
    ),
    Family(
        "waited_seconds",
        "gauge",
        "Time for which operations of the generation waited for a rank; the 8 largest.",
        (*_GROUP, "rank"),
    ),
    # Connections and liveness: of an engine, which groups may share.
    Family("connections_accepted_total", "counter", "Incoming connections.", _GROUP),
    Family(
        "connections_admitted_total",
        "counter",
        "Incoming connections that belonged to a generation.",
        _GROUP,
    ),
    Family("connections_local_total", "counter", "Admitted connections over Unix sockets.", _GROUP),
    Family(
        "connections_refused_total",
        "counter",
        "Incoming connections that did not belong here.",
        _GROUP,
    ),
    Family("liveness_connections", "gauge", "Open connections of the peer monitor.", _GROUP),
    Family("liveness_watches", "gauge", "Processes that the peer monitor watches.", _GROUP),
    Family("liveness_deaths_total", "counter", "Processes found dead.", _GROUP),
    Family("liveness_freezes_total", "counter", "Processes found frozen.", _GROUP),
    Family(
        "liveness_lost_connections_total",
        "counter",
        "Living processes found unreachable.",
        _GROUP,
    ),
    Family("liveness_notices_sent_total", "counter", "Notices of failures sent.", _GROUP),
    Family("liveness_notices_heard_total", "counter", "Notices of failures heard.", _GROUP),
    Family(
        "nccl_communicators_aborted_total",
        "counter",
        "NCCL communicators aborted by the process.",
        _GROUP,
    ),
    Family(
        "nccl_stuck_aborts_total",
        "counter",
        "NCCL aborts of the process that did not return in time.",
        _GROUP,
    ),
    Family("nccl_operations_watched", "gauge", "Operations in progress on devices.", _GROUP),
    # The process.
    Family("threads", "gauge", "Running threads of the library."),
    Family("stuck_threads", "gauge", "Threads abandoned because they did not end."),
    Family("open_descriptors", "gauge", "Descriptors open in the process."),
    # Elastic jobs.
    Family("elastic_view", "gauge", "Number of the newest view; 0: none yet."),
    Family("elastic_members", "gauge", "Members of the newest view."),
    Family("elastic_rank", "gauge", "This process's rank in the newest view."),
    Family("elastic_views_total", "counter", "Views that this process has formed."),
    Family("elastic_joined_total", "counter", "Members added by these views."),
    Family("elastic_lost_total", "counter", "Members dropped by these views."),
    Family(
        "elastic_recovery_seconds_total",
        "counter",
        "Time spent on changes of views, by phase: detect, release, agree, connect, tables, sync.",
        ("phase",),
    ),
    Family(
        "elastic_last_recovery_seconds",
        "gauge",
        "Time spent on the last change of view, by phase.",
        ("phase",),
    ),
    Family("elastic_agreements_total", "counter", "Agreements that this process waited for."),
    Family("elastic_agreement_seconds_total", "counter", "Time spent waiting for agreements."),
    Family("elastic_steps_committed_total", "counter", "Attempts at a step that were committed."),
    Family(
        "elastic_steps_repeated_total", "counter", "Attempts at a step that were not committed."
    ),
    Family("elastic_step", "gauge", "Steps committed, as the program's state counts them."),
    Family("elastic_syncs_total", "counter", "Syncs of the state."),
    Family("elastic_sync_bytes_total", "counter", "Bytes of state sent by syncs."),
)
