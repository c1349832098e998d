"""metrics(): valid text, whose counters follow what groups do."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from exposition import Samples, parse, total
from rankside import abort, wait_errored
from values import check_sum

import torchft_ext
from torchft_ext import _metrics
from torchft_ext._metric_families import FAMILIES, PREFIX

SUMS = 7
EXTENSIONS = Path(__file__).resolve().parents[3] / "docs" / "_ext"


def scraped() -> Samples:
    return parse(torchft_ext.metrics())


def own_group() -> str:
    return torchft_ext.backend().group_name


def grown(name: str, action, **labels: str) -> float:
    """By how much a counter of the default group grows while that is done."""
    before = total(scraped(), name, group=own_group(), **labels)
    action()
    return total(scraped(), name, group=own_group(), **labels) - before


def sums() -> None:
    for _ in range(SUMS):
        dist.all_reduce(torch.ones(1))


def growth_of_sums() -> tuple[float, float]:
    of_kind = grown("operations_total", sums, operation="allreduce")
    of_others = grown("operations_total", sums, operation="broadcast")
    return of_kind, of_others


def test_operations_are_counted_by_kind(ranks):
    for of_kind, of_others in ranks.world(2).run(growth_of_sums):
        assert (of_kind, of_others) == (SUMS, 0)


def gather() -> None:
    dist.all_gather_into_tensor(torch.ones(200), torch.ones(100))


def bytes_and_seconds() -> tuple[float, float, float]:
    of_sums = grown("operation_bytes_total", sums, operation="allreduce")
    of_a_gather = grown("operation_bytes_total", gather, operation="allgather")
    return of_sums, of_a_gather, grown("operation_seconds_total", sums, operation="allreduce")


def test_bytes_and_times_of_operations_are_counted_by_kind(ranks):
    for of_sums, of_a_gather, took in ranks.world(2).run(bytes_and_seconds):
        assert (of_sums, of_a_gather) == (4 * SUMS, 800), "the larger side counts"
        assert 0 < took < 60


def bytes_of_messages(rank: int) -> tuple[float, float]:
    def exchange() -> None:
        if rank == 0:
            dist.send(torch.ones(1000), 1)
        else:
            dist.recv(torch.ones(1000), 0)
        dist.barrier()

    sent = grown("sent_bytes_total", exchange)
    return sent, grown("received_bytes_total", exchange)


def test_bytes_are_counted_in_both_directions(ranks):
    world = ranks.world(2)
    sender = world.start(0, bytes_of_messages, 0)
    receiver = world.start(1, bytes_of_messages, 1)
    assert sender.value()[0] >= 4000 and receiver.value()[1] >= 4000


def test_failures_and_generations_are_counted(ranks):
    world = ranks.world(2)
    world.run(check_sum)
    before = world.on(0, scraped)
    group = world.on(0, own_group)
    world.on(0, abort, "for the record")
    world.on(0, wait_errored)
    failed = world.on(0, scraped)
    assert total(failed, "group_failed", group=group) == 1
    world = world.next()
    world.run(check_sum)
    after = world.on(0, scraped)
    for name, labels in (("failures_total", {"cause": "aborted"}), ("generations_total", {})):
        assert total(after, name, group=group, **labels) == 1 + total(
            before, name, group=group, **labels
        )
    assert total(after, "group_failed", group=group) == 0
    assert total(after, "group_size", group=group) == 2


def failed_before_and_after_its_end() -> tuple[float, float, float, float]:
    group = dist.new_group(backend="ft")
    held = torchft_ext.backend(group)
    name = held.group_name
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    held.abort("for the record")
    before = scraped()
    dist.destroy_process_group(group)
    after = scraped()
    of_state = (total(found, "group_failed", group=name) for found in (before, after))
    counted = (total(found, "operations_total", group=name) for found in (before, after))
    return (*of_state, *counted)


def test_group_that_was_shut_down_has_its_counters_alone(ranks):
    for failed, afterwards, *operations in ranks.fresh(2).run(failed_before_and_after_its_end):
        assert failed == 1 and afterwards == 0
        assert operations == [1, 1]


def test_text_holds_known_families_alone(ranks):
    world = ranks.world(2)
    families = {PREFIX + family.name for family in FAMILIES}
    found = world.on(0, scraped)
    assert found.keys() <= families
    assert f"{PREFIX}liveness_connections" in found and f"{PREFIX}threads" in found
    assert total(found, "build_info") == 1


def test_groups_of_one_name_are_one_series():
    found = {}
    _metrics._add(found, "sent_bytes_total", ("one", "host"), 3)
    _metrics._add(found, "sent_bytes_total", ("one", "host"), 4)
    _metrics._add(found, "group_size", ("one", "host"), 2)
    _metrics._add(found, "group_size", ("one", "host"), 1)
    samples = parse("".join(_metrics._lines(found)))
    assert total(samples, "sent_bytes_total") == 7 and total(samples, "group_size") == 2


def test_labels_are_escaped():
    found = {}
    _metrics._add(found, "sent_bytes_total", ('a "b"\\\nc', "host"), 1)
    text = "".join(_metrics._lines(found))
    assert r'group="a \"b\"\\\nc"' in text
    parse(text)


def test_page_has_the_table_of_the_code():
    sys.path.insert(0, str(EXTENSIONS))
    try:
        import metric_table
    finally:
        sys.path.remove(str(EXTENSIONS))
    page = metric_table.PAGE.read_text()
    assert page == metric_table.with_table(page), "run docs/_ext/metric_table.py"
    assert page.count("list-table") >= 2
