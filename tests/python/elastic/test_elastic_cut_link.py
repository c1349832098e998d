"""A process that cannot reach one of the members does not hold the job up."""

from __future__ import annotations

from namespaces import in_namespaces


def test_newcomer_that_cannot_reach_a_member_waits_and_the_job_goes_on(tmp_path):
    told = in_namespaces("cut_link", tmp_path)
    assert told["views"] == 0 and told["size_while_cut"] == 2, told
    assert told["cut"] > told["undisturbed"] / 2, told  # it was one in seventy
