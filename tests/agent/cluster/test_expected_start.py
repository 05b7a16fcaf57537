"""When waiting jobs are expected to start: by the scheduler's own rules, from the expected ends of others."""

from __future__ import annotations

from bagua_agent.cluster.expected_start import expected_starts
from tests.agent.cluster.cluster_pictures import NOW_S, POLICY, job, nodes, picture

TWO_NODES = {"a": "one:4:1", "b": "two:4:2"}


def test_a_job_starts_when_enough_others_have_ended() -> None:
    view = picture(
        nodes("a b"),
        job("one"),
        job("two"),
        job("small"),
        job("wide", 2),
        orders=TWO_NODES,
        running="one two",
    )
    ends = {"one": 60.0, "two": 20.0}
    found = expected_starts(view, NOW_S, POLICY, ends)
    assert found == {"small": 20.0}, "wide needs both nodes, and small has one of them then"
    assert expected_starts(view, NOW_S, POLICY, {**ends, "small": 90.0}) == {"small": 20.0, "wide": 90.0}


def test_priority_goes_before_the_order_of_submission() -> None:
    view = picture(
        nodes("a b"), job("one"), job("two"), job("early"), job("urgent", priority=5),
        orders=TWO_NODES, running="one two",
    )  # fmt: skip
    assert expected_starts(view, NOW_S, POLICY, {"one": 5.0, "two": 7.0}) == {"urgent": 5.0, "early": 7.0}


def test_there_is_no_prediction_without_an_end_or_without_enough_nodes() -> None:
    view = picture(
        nodes("a b"), job("one"), job("two"), job("next"), job("huge", 9), orders=TWO_NODES, running="one two"
    )
    assert expected_starts(view, NOW_S, POLICY, {}) == {}
    assert expected_starts(view, NOW_S, POLICY, {"one": 1.0, "two": 2.0}) == {"next": 1.0}
