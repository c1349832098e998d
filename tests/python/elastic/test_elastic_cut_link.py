"""Processes that cannot reach one of the members do not hold the job up."""

from __future__ import annotations

import pytest
from namespaces import in_namespaces

FEWEST = 5  # steps a second: a view that comes to nothing costs two seconds; undisturbed, a hundred


@pytest.mark.parametrize(
    "trouble", ["no way", "no way there", "no way back", "firewall", "small packets"]
)
def test_newcomer_that_cannot_reach_a_member_waits_and_the_job_goes_on(tmp_path, trouble):
    told = in_namespaces("cut_link", tmp_path, trouble)
    assert told["views"] == 0 and told["size"] == 2, told
    assert told["disturbed"] > FEWEST, told


def test_link_that_breaks_again_and_again_is_done_without(tmp_path):
    told = in_namespaces("cut_link", tmp_path, "flapping")
    assert told["size"] == 2, told
    assert told["views"] == 0, told  # it was two and more each time
    assert told["disturbed"] > FEWEST, told
