"""Which jobs give nodes back for one that waits, and who waits meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_pictures import (
    absent,
    changes_nothing,
    job,
    node,
    nodes,
    picture,
    planned,
    unit,
    where,
    with_progress,
    with_unit,
)

from bagua_agent.cluster.cluster_view import (
    ClusterView,
    UnitState,
)


# -- nodes that others can spare
def surplus() -> ClusterView:
    jobs = (job("low", 1, 3, priority=-1), job("far", 1, 3), job("near", 1, 2), job("new", 1))
    orders = {
        "a": "low:4:1",
        "b": "low:4:2",
        "c": "far:4:5",
        "d": "far:4:4",
        "e": "far:4:3",
        "f": "near:4:9",
        "g": "near:4:8",
    }
    return picture(nodes("a b c d e f g"), *jobs, orders=orders, running="low far near")


def test_the_lowest_priority_gives_first_then_the_one_furthest_above_its_newest() -> None:
    view = surplus()
    assert where(view)["new"] == "b"
    more = replace(view, submissions=(*view.submissions[:3], job("new", 2)))
    assert where(more)["new"] == "b c"
    more = replace(view, submissions=(*view.submissions[:3], job("new", 4)))
    assert where(more) == {"far": "e", "low": "a", "near": "g", "new": "b c d f"}


def test_no_job_gives_below_its_minimum_and_nothing_is_given_in_vain() -> None:
    view = surplus()
    view = replace(view, submissions=(*view.submissions[:3], job("new", 5)))
    todo = planned(view)
    assert changes_nothing(todo)
    reason = "waits for 1 of 5 nodes with all slots free; the others are used by jobs that can spare none"
    assert todo.jobs["new"].reason == reason


def test_a_node_that_does_not_work_yet_is_given_before_a_newer_one_that_does() -> None:
    orders = {"a": "x:4:1", "b": "x:4:2", "c": "x:4:3"}
    view = picture(nodes("a b c"), job("x", 1, 3), job("new"), orders=orders, running="x")
    view = with_progress(view, "x", arrived=frozenset({"b", "c"}))
    assert where(view) == {"new": "a", "x": "b c"}


def test_who_gave_once_is_no_longer_the_furthest_above() -> None:
    jobs = (job("x", 1, 3), job("y", 1, 2), job("new", 2))
    orders = {"a": "x:4:1", "b": "x:4:2", "c": "x:4:3", "d": "y:4:5", "e": "y:4:6"}
    view = picture(nodes("a b c d e"), *jobs, orders=orders, running="x y")
    assert where(view) == {"new": "c e", "x": "a b", "y": "d"}


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("its unit ended", {"new": "a", "old": "b c"}),
        ("its workers are not ready", {"new": "a", "old": "b c"}),
        ("its daemon is away", {"old": "a b c"}),
    ],
)
def test_what_is_not_known_to_work_does_not_count_towards_the_minimum(
    what: str, expected: dict[str, str]
) -> None:
    jobs = (job("old", 2, 3), job("new", 1))
    orders = {"a": "old:4:1", "b": "old:4:2", "c": "old:4:3"}
    view = picture(nodes("a b c"), *jobs, orders=orders, running="old")
    assert where(view) == {"new": "c", "old": "a b"}
    if what == "its unit ended":
        view = with_unit(view, "a", unit("old", (), UnitState.WAITING, failures=1), "old")
    elif what == "its workers are not ready":
        view = with_progress(view, "old", arrived=frozenset({"b", "c"}))
    else:
        view = absent(view, "a")
    assert where(view) == expected


def test_several_jobs_give_one_node_together_and_none_needlessly() -> None:
    jobs = (job("x", 1, 2, 1, priority=-1), job("y", 1, 2, 3), job("new", 1, 1, 4))
    orders = {"a": "x:1:1 y:3:2", "b": "x:1:3 y:3:4"}
    view = picture([node("a"), node("b")], *jobs, orders=orders, running="x y")
    assert where(view) == {"new": "b", "x": "a", "y": "a"}
    view = replace(view, submissions=(*jobs[:2], job("new", 1, 1, 3)))
    assert where(view) == {"new": "b", "x": "a b", "y": "a"}, "three slots of y are enough"


def test_a_job_that_has_not_begun_gives_what_is_above_its_minimum() -> None:
    jobs = (job("x", 1, 2), job("new"))
    assert where(picture(nodes("a b"), *jobs, orders={"a": "x:4:1", "b": "x:4:2"})) == {"new": "b", "x": "a"}


# -- waiting
def test_who_waits_keeps_those_behind_from_nodes_that_it_could_use() -> None:
    jobs = (job("runs"), job("big", 3), job("small"))
    view = picture(nodes("a b c"), *jobs, orders={"a": "runs:4:1"}, running="runs")
    assert changes_nothing(planned(view))
    reasons = {j: p.reason for j, p in planned(view).jobs.items()}
    assert reasons["big"].startswith("waits for 1 of 3 nodes with all slots free")
    assert reasons["small"] == "waits for 1 of 1 node with all slots free; job big waits for such nodes first"
