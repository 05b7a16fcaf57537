"""Each rule of placement, on a picture small enough to see the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_pictures import (
    NOW_S,
    POLICY,
    absent,
    changes_nothing,
    drained,
    ended,
    job,
    node,
    nodes,
    picture,
    planned,
    unit,
    where,
    with_node,
    with_progress,
    with_unit,
)

from bagua_agent.cluster.cluster_plan import JobState
from bagua_agent.cluster.cluster_view import (
    ClusterView,
    JobEnd,
    OrderView,
    OutcomeView,
    UnitState,
)

DONE = OutcomeView(JobEnd.FAILED, 3, "it broke", NOW_S - 10.0)


# -- starting
def test_a_gang_is_started_whole_or_not_at_all() -> None:
    assert where(picture(nodes("a b"), job("x", 2))) == {"x": "a b"}
    view = picture(nodes("a b"), job("x", 3))
    assert changes_nothing(planned(view))
    assert planned(view).jobs["x"].state is JobState.QUEUED


def test_all_slots_of_a_node_are_ordered_as_so_many() -> None:
    todo = planned(picture([node("a", 3), node("b", 5)], job("x", 2)))
    assert todo.orders == {"a": (OrderView("x", 3, 1),), "b": (OrderView("x", 5, 1),)}


def test_numbers_grow_over_all_that_is_known() -> None:
    orders = {"a": "x:1:7"}
    view = picture(nodes("a b"), job("x", 1, 1, 1), job("y", 1, 1, 1), orders=orders)
    view = with_unit(view, "b", unit("z", state=UnitState.ENDED, order=11), "z")
    assert planned(view).orders == {"a": (OrderView("x", 1, 7), OrderView("y", 1, 12))}


def test_jobs_share_a_node_and_leave_large_ones_free() -> None:
    view = picture([node("a", 8), node("b", 4), node("c", 8)], job("x", 1, 1, 4), job("y", 1, 1, 3))
    assert where(view) == {"x": "b", "y": "a"}
    view = picture([node("a", 8), node("b", 8)], job("w", 1, 1, 5), job("x", 1, 1, 3), orders={"b": "w:5:1"})
    assert where(view) == {"w": "b", "x": "b"}
    view = picture([node("a", 8), node("b", 2)], job("x"))
    assert where(view) == {"x": "b"}, "all slots of the smallest node"


def test_a_node_that_no_job_has_to_leave_comes_first() -> None:
    view = picture(nodes("a b"), job("x"), orders={"a": ""})
    view = with_unit(view, "a", unit("gone", range(4), UnitState.LEAVING), "gone")
    assert where(view) == {"x": "b"}
    full = replace(view, orders={"a": (), "b": (OrderView("y", 4, 1),)})
    assert where(full) == {"x": "a", "y": "b"}, "but it is promised: the daemon waits until it is free"
    assert "node a is being given back by job gone" in planned(full).jobs["x"].reason


@pytest.mark.parametrize(
    "changes",
    [
        {"troubles": ("no GPU",)},
        {"present": False, "absent_since_s": NOW_S},
        {"slots": 3},
        {"labels": {"k": "w"}},
    ],
    ids=lambda c: next(iter(c)),
)
def test_nodes_that_are_not_well_or_do_not_fit_get_nothing(changes: dict[str, object]) -> None:
    view = picture([node("a", labels={"k": "v", "z": "1"})], job("x", 1, 1, 4, labels={"k": "v"}))
    assert where(view) == {"x": "a"}
    assert where(with_node(view, "a", **changes)) == {}
    assert where(drained(view, "a")) == {}


def test_higher_priority_goes_first_then_the_earlier_submitted() -> None:
    view = picture(nodes("a"), job("x"), job("y", priority=1), job("z", priority=1))
    assert where(view) == {"y": "a"}


def test_those_behind_may_have_nodes_that_it_could_not_use() -> None:
    jobs = (job("runs", slots=4), job("big", 2, slots=4), job("small", slots=1))
    cluster = [node("a"), node("b"), node("c", 2)]
    view = picture(cluster, *jobs, orders={"a": "runs:4:1"}, running="runs")
    assert where(view) == {"runs": "a", "small": "c"}


def test_a_job_that_can_never_run_here_keeps_no_other_waiting() -> None:
    for never in (job("never", 3), job("never", 1, 1, 9), job("never", labels={"k": "v"})):
        view = picture(nodes("a b"), never, job("small"))
        assert where(view) == {"small": "a"}, never
        assert planned(view).outcomes == {}
    # a node that is only away for a moment still counts
    view = absent(picture(nodes("a b c"), job("big", 3), job("small")), "c", NOW_S - 5.0)
    assert where(view) == {}
    assert planned(view).again_at_s == NOW_S + 10.0
    assert where(view, NOW_S + 10.0) == {"small": "a"}


def test_reasons_say_what_would_help() -> None:
    view = picture(
        [*nodes("a b"), node("c", 2)], job("x", 3, slots=4), job("y", slots=9), job("z", labels={"k": "v"})
    )
    reasons = {j: p.reason for j, p in planned(drained(view, "a")).jobs.items()}
    assert reasons == {
        "x": "needs 3 nodes with 4 free slots, and there are 1 it could use; "
        "a is drained (new disk); c has only 2 slots",
        "y": "needs 1 node with 9 free slots, and there are 0 it could use; the largest has 4 slots",
        "z": "needs 1 node with all slots free and k=v, and there are 0 it could use; 0 of 3 nodes have the labels",
    }


def test_a_node_that_is_being_given_back_is_named() -> None:
    view = picture(nodes("h1 h2 h3"), job("demo", 1), job("x", 3), orders={"h3": "demo:4:1"}, running="demo")
    view = ended(view, "demo", DONE)
    reason = "waits for 1 of 3 nodes with all slots free; node h3 is being given back by job demo"
    assert planned(view).jobs["x"].reason == reason


# -- growing
def test_free_nodes_go_one_by_one_to_the_least_part_of_its_most() -> None:
    jobs = (job("x", 1, 4), job("y", 1, 2))
    view = picture(nodes("a b c d"), *jobs, orders={"a": "x:4:1", "b": "y:4:2"}, running="x y")
    assert where(view) == {"x": "a c d", "y": "b"}
    view = with_node(view, "d", troubles=("x",))
    assert where(view) == {"x": "a c", "y": "b"}
    view = picture(
        nodes("a b c"), job("x", 1, 2), job("y", 1, 2, priority=1), orders={"a": "x:4:1", "b": "y:4:2"}
    )
    assert where(view) == {"x": "a", "y": "b c"}, "of equal parts the higher priority goes first"


def test_of_equal_parts_and_priorities_the_earlier_submitted_grows_first() -> None:
    view = picture(nodes("a b c"), job("y", 1, 2), job("x", 1, 2), orders={"a": "x:4:1", "b": "y:4:2"})
    assert where(view) == {"x": "a", "y": "b c"}


def test_no_job_grows_beyond_its_most_or_while_another_waits() -> None:
    assert where(picture(nodes("a b c"), job("x", 1, 2))) == {"x": "a b"}
    jobs = (job("x", 1, 9, slots=1), job("big", 2, slots=4))
    cluster = [node("a"), node("b"), node("c", 1)]
    view = picture(cluster, *jobs, orders={"a": "x:1:1"}, running="x")
    assert where(view) == {"x": "a c"}, "only where the other could not be"


def test_no_job_grows_into_slots_that_another_has_to_leave_first() -> None:
    view = picture(nodes("a b"), job("x", 1, 2), orders={"a": "x:4:1", "b": ""}, running="x")
    view = with_unit(view, "b", unit("gone", (0,), UnitState.LEAVING), "gone")
    assert changes_nothing(planned(view))


def test_what_a_job_got_as_growth_may_let_it_spare_another() -> None:
    """The new node does not help the waiting job, but frees one that does, in the same plan."""
    cluster = [node("a", labels={"k": "v"}), node("b")]
    jobs = (job("x", 1, 2), job("y", labels={"k": "v"}))
    view = picture(cluster, *jobs, orders={"a": "x:4:1"})
    assert where(view) == {"x": "b", "y": "a"}


# -- staying and leaving
def test_scaled_down_it_gives_the_newest_and_scaled_up_it_is_filled() -> None:
    orders = {"a": "x:4:3", "b": "x:4:2", "c": "x:4:1"}
    view = picture(nodes("a b c d"), job("x", 1, 2), orders=orders, running="x")
    assert where(view) == {"x": "b c"}
    view = with_progress(view, "x", arrived=frozenset({"a", "c"}))
    assert where(view) == {"x": "a c"}, "first the one that does not work yet"
    assert where(replace(view, submissions=(job("x", 4, 4),))) == {"x": "a b c d"}


def test_scaled_down_it_stays_at_its_minimum_while_others_do_not_work() -> None:
    view = picture(nodes("a b c"), job("x", 2, 2), orders={n: "x:4:1" for n in "abc"}, running="x")
    view = with_unit(view, "a", None, "x")
    view = with_unit(view, "b", None, "x")
    assert where(view) == {"x": "a b c"}


@pytest.mark.parametrize("trouble", [False, True])
def test_a_node_to_be_left_is_replaced_first(trouble: bool) -> None:
    orders = {"a": "x:4:1", "b": "x:4:2", "c": ""}
    view = picture(nodes("a b c"), job("x", 2), orders=orders, running="x")
    view = with_node(view, "a", troubles=("no GPU",)) if trouble else drained(view, "a")
    todo = planned(view)
    assert todo.orders == {"c": (OrderView("x", 4, 3),)}
    why = "a is in trouble (no GPU)" if trouble else "a is drained (new disk)"
    assert f"{why}; left once another node is ready instead" in todo.jobs["x"].reason
    view = replace(view, orders={**view.orders, **todo.orders})
    assert changes_nothing(planned(view)), "ordered is not yet ready"
    view = with_unit(view, "c", unit("x", range(4)), "x")
    assert changes_nothing(planned(view)), "started is not yet ready"
    view = with_progress(view, "x", arrived=frozenset("abc"))
    assert where(view) == {"x": "b c"}


def test_a_node_to_be_left_is_left_at_once_where_the_minimum_goes_on_or_by_force() -> None:
    orders = {"a": "x:4:1", "b": "x:4:2"}
    view = picture(nodes("a b"), job("x", 1, 2), orders=orders, running="x")
    assert where(drained(view, "a")) == {"x": "b"}
    view = picture(nodes("a b"), job("x", 2, 2), orders=orders, running="x")
    assert where(drained(view, "a")) == {"x": "a b"}
    todo = planned(drained(view, "a", force=True))
    assert todo.orders == {"a": ()}
    assert "is below its minimum" in todo.jobs["x"].reason
    assert "a is drained by force (new disk)" in todo.jobs["x"].reason


def test_two_nodes_to_be_left_at_the_minimum_go_one_by_one() -> None:
    orders = {"a": "x:4:1", "b": "x:4:2", "c": "x:4:3"}
    view = picture(nodes("a b c d"), job("x", 2, 3), orders=orders, running="x")
    assert where(drained(drained(view, "a"), "b")) == {"x": "a c d"}


def test_a_lost_node_is_given_up_after_its_time_and_replaced() -> None:
    view = picture(nodes("a b c"), job("x", 2), orders={"a": "x:4:1", "b": "x:4:2"}, running="x")
    view = absent(view, "a", NOW_S)
    todo = planned(view, NOW_S + 14.9)
    assert changes_nothing(todo) and todo.again_at_s == NOW_S + 15.0
    assert "a is not heard of" in todo.jobs["x"].reason
    late = planned(view, NOW_S + 15.0)
    assert late.orders == {"a": (), "c": (OrderView("x", 4, 3),)} and late.again_at_s is None
    assert "a is lost" in late.jobs["x"].reason


def test_orders_of_a_node_never_seen_stand_until_it_is_lost() -> None:
    view = picture([], job("x"), orders={"a": "x:4:1"}, running="x", since_s=NOW_S - 10.0)
    assert changes_nothing(planned(view)) and planned(view).again_at_s == NOW_S + 5.0
    assert planned(view, NOW_S + 5.0).orders == {"a": ()}


def test_a_name_that_has_only_an_empty_order_is_no_node() -> None:
    view = picture(nodes("a b"), job("x", 3), orders={"a": "", "b": "", "gone": ""})
    todo = planned(view)
    assert changes_nothing(todo) and todo.again_at_s is None
    assert todo.jobs["x"].reason == (
        "needs 3 nodes with all slots free, and there are 2 it could use; 2 of 2 nodes are known"
    )


def test_a_lost_node_is_named_as_lost_whatever_it_has() -> None:
    view = absent(picture(nodes("a b c"), job("x", 3)), "c", 0.0)
    assert planned(view).jobs["x"].reason.endswith("; c is lost")
    small = absent(picture([*nodes("a b", 8), node("c", 2)], job("x", 3, slots=8)), "c", 0.0)
    assert planned(small).jobs["x"].reason.endswith("; c is lost")


def test_a_node_that_has_orders_and_is_not_heard_of_is_named_so() -> None:
    jobs = (job("x", 3), job("y"))
    view = picture(nodes("a b"), *jobs, orders={"c": "y:4:1"}, running="y", since_s=NOW_S - 10.0)
    assert "c is not heard of" in planned(view).jobs["x"].reason
    late = planned(view, NOW_S + 5.0)
    assert late.orders["c"] == () and "0 slots" not in late.jobs["x"].reason, late.jobs["x"]


def test_one_below_its_minimum_comes_before_all_who_wait_and_takes_what_others_can_spare() -> None:
    jobs = (job("high", priority=9), job("rich", 1, 2), job("short", 2))
    orders = {"a": "rich:4:1", "b": "rich:4:2", "c": "short:4:3", "d": ""}
    view = picture(nodes("a b c d"), *jobs, orders=orders, running="rich short")
    assert where(view) == {"high": "b", "rich": "a", "short": "c d"}
    less = with_node(view, "d", troubles=("x",))
    assert where(less) == {"rich": "a", "short": "b c"}


def test_one_below_its_minimum_takes_free_nodes_but_no_others_if_that_is_not_enough() -> None:
    jobs = (job("rich", 1, 2), job("short", 4), job("small"))
    orders = {"a": "rich:4:1", "b": "rich:4:2", "c": "short:4:3", "d": "", "e": "late:4:9"}
    view = picture(nodes("a b c d e"), *jobs, orders=orders, running="rich short")
    assert where(view) == {"late": "e", "rich": "a b", "short": "c d"}


def test_one_that_lost_all_its_nodes_goes_first() -> None:
    view = picture(nodes("a"), job("x", priority=1), job("y"), running="y")
    todo = planned(view)
    assert where(view) == {"y": "a"}
    assert todo.jobs["y"].state is JobState.RUNNING
    view = picture([], job("y"), running="y")
    assert planned(view).jobs["y"].state is JobState.QUEUED
    assert planned(view).jobs["y"].reason.startswith("had begun and has no node any more; needs 1 node")


def test_a_gang_that_can_not_be_completed_gives_everything_back() -> None:
    """The last scheduler got half way, and then a node broke: there is no state to lose yet."""
    orders = {"a": "x:4:1", "b": ""}
    assert where(picture(nodes("a b"), job("x", 2), orders=orders)) == {"x": "a b"}
    view = with_node(picture(nodes("a b"), job("x", 2), job("small"), orders=orders), "b", troubles=("x",))
    assert where(view) == {"small": "a"}
    begun = replace(view, progress={**view.progress, "x": replace(view.progress["x"], begun=True)})
    assert where(begun) == {"x": "a"}


def test_one_that_has_not_begun_leaves_a_drained_node_at_once() -> None:
    view = drained(picture(nodes("a b"), job("x"), orders={"a": "x:4:1"}), "a")
    assert where(view) == {"x": "b"}


# -- units that fail
def test_a_node_that_failed_five_times_is_left_out_for_this_job_alone() -> None:
    view = picture(nodes("a b"), job("x", 1), job("y", 1), orders={"a": "x:4:1", "b": ""}, running="x")
    four = with_unit(view, "a", unit("x", (), UnitState.WAITING, failures=4, reason="no such user"), "x")
    assert where(four) == {"x": "a", "y": "b"}
    assert "a is tried again after 4 failures in a row: no such user" in planned(four).jobs["x"].reason
    five = with_unit(view, "a", unit("x", (), UnitState.ENDED, failures=5, reason="no such user"), "x")
    todo = planned(five)
    assert where(five) == {"x": "b", "y": "a"}
    assert "a is left out (5 failures in a row, the last: no such user)" in todo.jobs["x"].reason


def test_a_refused_job_is_not_sent_there_again() -> None:
    view = picture(nodes("a"), job("x"))
    view = with_unit(view, "a", unit("x", (), UnitState.REFUSED, reason="no such directory"), "x")
    assert changes_nothing(planned(view))
    reason = (
        "needs 1 node with all slots free, and there are 0 it could use; a is left out (no such directory)"
    )
    assert planned(view).jobs["x"].reason == reason


def test_an_order_larger_than_its_node_goes_unless_it_runs() -> None:
    view = picture([node("a", 3)], job("x"), orders={"a": "x:4:1"})
    assert changes_nothing(planned(view))
    assert planned(with_unit(view, "a", None, "x")).orders == {"a": (OrderView("x", 3, 2),)}


# -- a store that lost its keys
def test_nothing_is_decided_until_the_picture_is_whole() -> None:
    view = picture(
        nodes("a b"), job("x"), job("y"), job("z", stop=True), orders={"b": "y:4:1"}, since_s=NOW_S
    )
    view = ended(replace(view, submissions=(*view.submissions, job("w"))), "w", DONE)
    todo = planned(view, NOW_S + 2.9)
    assert changes_nothing(todo) and todo.again_at_s == NOW_S + POLICY.settle_s
    states = [todo.jobs[j].state for j in "xyzw"]
    assert states == [JobState.QUEUED, JobState.STARTING, JobState.STOPPING, JobState.ENDED]
    assert where(view, NOW_S + 3.0) == {"x": "a", "y": "b"}


def test_what_runs_without_a_key_is_taken_as_ordered() -> None:
    view = picture(nodes("a b"), job("x"), job("y"), orders={"a": "x:4:5"}, running="x")
    view = replace(view, orders={})
    todo = planned(view)
    assert todo.orders == {"a": (OrderView("x", 4, 5),), "b": (OrderView("y", 4, 6),)}
    leaving = with_unit(view, "a", unit("x", range(4), UnitState.LEAVING), "x")
    assert where(leaving) == {"x": "b", "y": "a"}, "who is on its way out is not called back"


def test_a_job_whose_submission_is_unknown_is_left_alone() -> None:
    view = picture(nodes("a b"), job("y", 2), orders={"a": "lost:4:1"})
    assert changes_nothing(planned(view))
    assert planned(view).jobs["lost"].reason.startswith("runs, but its submission is unknown")
    assert changes_nothing(planned(absent(view, "a", 0.0)))


def test_empty_orders_are_said_where_there_is_no_key() -> None:
    view = picture(nodes("a"), job("x", 2), orders={"a": "x:4:1"})
    view = replace(view, orders={})
    assert planned(view).orders == {"a": ()}, "or its daemon would go on, since absence ends nothing"
    assert planned(picture(nodes("a"), job("x", 2))).orders == {}


# -- ends
def test_a_result_becomes_the_outcome_and_units_have_time_to_end() -> None:
    view = ended(
        picture(nodes("a b"), job("x", 2), orders={"a": "x:4:1", "b": "x:4:1"}, running="x"), "x", DONE
    )
    view = with_unit(view, "b", unit("x", (), UnitState.ENDED), "x")
    todo = planned(view)
    assert todo.outcomes == {"x": DONE}
    assert todo.orders == {"b": ()}
    assert todo.again_at_s == DONE.since_s + POLICY.wind_down_s
    assert todo.jobs["x"].reason == "failed with exit code 3: it broke; still ends on a"
    late = planned(view, DONE.since_s + POLICY.wind_down_s)
    assert late.orders == {"a": (), "b": ()} and late.again_at_s is None
    again = planned(ended(view, "x", DONE, written=True))
    assert again.outcomes == {} and again.orders == {"b": ()}


def test_an_ended_job_is_not_started_again_and_needs_no_submission() -> None:
    assert changes_nothing(planned(ended(picture(nodes("a"), job("x")), "x", DONE, written=True)))
    view = picture(nodes("a"), orders={"a": "x:4:1"})
    view = with_unit(ended(view, "x", DONE, written=True), "a", None, "x")
    assert planned(view).orders == {"a": ()}


def test_an_absent_node_of_an_ended_job_keeps_its_order_until_it_is_lost() -> None:
    view = picture(nodes("a"), job("x"), orders={"a": "x:4:1"}, running="x")
    view = ended(with_unit(view, "a", None, "x"), "x", replace(DONE, since_s=NOW_S))
    view = absent(view, "a", NOW_S)
    assert planned(view).orders == {}
    assert planned(view, NOW_S + 15.0).orders == {"a": ()}


def test_stopped_before_it_began() -> None:
    todo = planned(picture(nodes("a"), job("x", stop=True)))
    assert todo.outcomes == {"x": OutcomeView(JobEnd.STOPPED, 0, "stopped before it began", NOW_S)}
    assert todo.jobs["x"].state is JobState.ENDED


def test_a_stopping_job_is_over_once_nothing_of_it_lives() -> None:
    view = picture(nodes("a b"), job("x", 2, stop=True), orders={"a": "x:4:1", "b": "x:4:1"}, running="x")
    todo = planned(view)
    assert changes_nothing(todo) and todo.jobs["x"].reason == "was asked to stop; has yet to leave a, b"
    view = with_unit(view, "a", None, "x")
    assert planned(view).orders == {"a": ()} and planned(view).outcomes == {}
    # no order any more, and yet a unit lives
    view = replace(view, orders={"a": (), "b": ()})
    assert changes_nothing(planned(view))
    assert planned(view).jobs["x"].reason == "was asked to stop; its last units have yet to end"
    assert (
        planned(absent(view, "b", 0.0)).outcomes["x"].reason
        == "stopped; its agents are gone and wrote no result"
    )
    assert planned(ended(with_unit(view, "b", None, "x"), "x", DONE)).outcomes == {"x": DONE}


def renamed_to_b(**of_b: object) -> ClusterView:
    """Job x on a and c; the daemon of a was started again as b, and found its unit."""
    view = picture(
        [node("a", boot_id="1"), node("c", boot_id="3")],
        job("x", 2),
        orders={"a": "x:4:1", "c": "x:4:1"},
        running="x",
    )
    b = node("b", units=(unit("x", range(4), order=1),), **{"boot_id": "1", **of_b})
    return absent(with_node(replace(view, nodes={**view.nodes, "b": b}), "a", units=()), "a")


def test_a_node_that_comes_back_under_another_name_keeps_the_units_that_it_runs() -> None:
    view = renamed_to_b()
    assert planned(view).orders == {"a": (), "b": (OrderView("x", 4, 1),)}
    other = with_node(view, "b", units=(unit("x", range(4), order=7),))
    assert planned(other).orders["b"] == (), "of another order: the job has its nodes"
    leaving = with_node(view, "b", units=(unit("x", range(4), UnitState.LEAVING, order=1),))
    assert "a" not in planned(leaving).orders


def test_a_node_that_is_absent_beside_a_renamed_one_keeps_its_order() -> None:
    """All orders of a plan have one number, so the nodes of a gang differ by their hosts alone."""
    view = absent(renamed_to_b(), "c")
    assert planned(view).orders == {"a": (), "b": (OrderView("x", 4, 1),)}


@pytest.mark.parametrize("boot_id", ["2", ""])
def test_an_absent_node_keeps_its_order_while_another_host_runs_that_of_a_lost_key(boot_id: str) -> None:
    assert "a" not in planned(renamed_to_b(boot_id=boot_id)).orders
