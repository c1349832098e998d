"""What the library counts, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchft_ext import _C, _build_info
from torchft_ext._metric_families import FAMILIES, PREFIX, Family
from torchft_ext._stats import GroupFields
from torchft_ext._tally import Tally, tally

__all__ = ["metrics"]

_Series = dict[tuple[str, tuple[str, ...]], float]  # by name and labels
_BY_NAME = {family.name: family for family in FAMILIES}

# Metric -> the name under which the engine counts it.
_COUNTERS = {
    "connections_accepted_total": "connections_accepted",
    "connections_admitted_total": "connections_admitted",
    "connections_local_total": "connections_local",
    "connections_refused_total": "connections_refused",
    "nccl_communicators_aborted_total": "nccl_aborted",
    "nccl_stuck_aborts_total": "nccl_stuck_aborts",
    "nccl_operations_watched": "nccl_operations_watched",
}
_MONITOR = {
    "liveness_connections": "connections",
    "liveness_watches": "watches",
    "liveness_deaths_total": "deaths",
    "liveness_freezes_total": "freezes",
    "liveness_lost_connections_total": "lost_connections",
    "liveness_notices_sent_total": "notices_sent",
    "liveness_notices_heard_total": "notices_heard",
}
_MOST_RANKS = 8  # with a series of their own: those that were waited for longest


def metrics() -> str:
    """Return what the library counts in this process, in Prometheus' text format 0.0.4.

    Of every group that lives, also of those that C++ has made, and of elastic jobs. Counters go on
    for as long as their group lives; two groups of one name are counted together. A group that was
    shut down, and that somebody still holds, has its counters alone.
    docs/reference/metrics.md has the names. Does not block, holds up no operation, and needs no
    other process. With TORCHFT_EXT_METRICS=127.0.0.1:9400 the process serves the same over HTTP.
    Threads: any.
    """
    found: _Series = {}
    versions = (_build_info.VERSION, torch.__version__)
    _add(found, "build_info", versions, 1)
    for group in _C._group_stats():
        _add_group(found, group)
    for name, count in zip(
        ("threads", "stuck_threads", "open_descriptors"), _C._process_stats(), strict=True
    ):
        _add(found, name, (), count)
    _add_elastic(found, tally)
    return "".join(_lines(found))


def _add(found: _Series, name: str, labels: tuple[str, ...], value: float) -> None:
    """Count it; of groups of one name and engine the sum, or the largest of what is no count."""
    key = (name, labels)
    if _BY_NAME[name].kind == "counter":
        found[key] = found.get(key, 0) + value
    else:
        found[key] = max(found.get(key, value), value)


def _add_group(found: _Series, group: GroupFields) -> None:
    labels = (group["name"], group.get("engine", "none"))
    _add(found, "sent_bytes_total", labels, group["bytes_sent"])
    _add(found, "received_bytes_total", labels, group["bytes_received"])
    _add(found, "generations_total", labels, group["generations"])
    _add(found, "failed_configures_total", labels, group["failed_configures"])
    for name, by_kind in (
        ("operations_total", group["operations"]),
        ("operation_bytes_total", group["operation_bytes"]),
        ("operation_seconds_total", group["operation_seconds"]),
    ):
        for operation, value in by_kind.items():
            _add(found, name, (*labels, operation), value)
    for cause, count in group["failures"].items():
        _add(found, "failures_total", (*labels, cause), count)
    _add_counters(found, labels, _COUNTERS, group.get("counters", {}))
    _add_counters(found, labels, _MONITOR, group.get("monitor") or {})
    if not group["shut_down"]:  # it may live on for long, in a cycle
        _add_state(found, labels, group)


def _add_state(found: _Series, labels: tuple[str, str], group: GroupFields) -> None:
    _add(found, "generation", labels, group["generation"])
    _add(found, "group_size", labels, group["size"])
    _add(found, "group_rank", labels, group["rank"])
    _add(found, "group_failed", labels, group["failed"])
    for phase, seconds in group["last_configure_seconds"].items():
        _add(found, "configure_seconds", (*labels, phase), seconds)
    waits = sorted(group["waited_for"].items(), key=lambda wait: -wait[1])
    for rank, seconds in waits[:_MOST_RANKS]:
        _add(found, "waited_seconds", (*labels, str(rank)), seconds)


def _add_counters(
    found: _Series, labels: tuple[str, str], names: dict[str, str], counters: dict[str, int]
) -> None:
    for name, of_engine in names.items():
        if of_engine in counters:
            _add(found, name, labels, counters[of_engine])


def _add_elastic(found: _Series, counts: Tally) -> None:
    values = {
        "elastic_view": counts.view,
        "elastic_members": counts.members,
        "elastic_rank": counts.rank,
        "elastic_views_total": counts.views,
        "elastic_joined_total": counts.joined,
        "elastic_lost_total": counts.lost,
        "elastic_agreements_total": counts.agreements,
        "elastic_agreement_seconds_total": counts.agreement_seconds,
        "elastic_steps_committed_total": counts.committed,
        "elastic_steps_repeated_total": counts.repeated,
        "elastic_step": counts.step,
        "elastic_syncs_total": counts.syncs,
        "elastic_sync_bytes_total": counts.sync_bytes,
    }
    for name, value in values.items():
        _add(found, name, (), value)
    for phase, seconds in counts.seconds_of.items():
        _add(found, "elastic_recovery_seconds_total", (phase,), seconds)
    for phase, seconds in counts.last_seconds_of.items():
        _add(found, "elastic_last_recovery_seconds", (phase,), seconds)


def _lines(found: _Series) -> Iterator[str]:
    """Each family's series stand together, as the format wants it."""
    for family in FAMILIES:
        series = [(labels, value) for (name, labels), value in found.items() if name == family.name]
        if not series:
            continue
        name = PREFIX + family.name
        yield f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n"
        for labels, value in series:
            yield f"{name}{_labels(family, labels)} {_number(value)}\n"


def _labels(family: Family, values: tuple[str, ...]) -> str:
    if not values:
        return ""
    pairs = zip(family.labels, values, strict=True)
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
