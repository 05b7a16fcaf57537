"""Rules of placement for jobs of allowed sizes (docs/design/service-mode.md, Sizes), each on a small picture."""

from __future__ import annotations

import pytest
from cluster_pictures import (
    POLICY,
    absent,
    changes_nothing,
    drained,
    job,
    nodes,
    picture,
    planned,
    where,
    with_node,
    with_progress,
)

from bagua_agent.base.sizes import Groups, SizePolicy
from bagua_agent.cluster.cluster_view import ClusterView, SubmissionView
from bagua_agent.cluster.node_trouble import lost_at_s

TWO_OR_FOUR = SizePolicy((2, 4))


def sized(name: str = "x", policy: SizePolicy = TWO_OR_FOUR, **more: object) -> SubmissionView:
    return job(name, policy.sizes[0], policy.sizes[-1], size_policy=policy, **more)  # type: ignore[arg-type]


def running(names: str, *others: SubmissionView, free: str = "", **more: object) -> ClusterView:
    """Job x runs on `names`, oldest order first."""
    orders = {n: f"x:4:{1 + i}" for i, n in enumerate(names.split())}
    return picture(nodes(f"{names} {free}"), sized(**more), *others, orders=orders, running="x")


@pytest.mark.parametrize(
    ("names", "policy", "expected"),
    [
        ("a", TWO_OR_FOUR, {}),
        ("a b", TWO_OR_FOUR, {"x": "a b"}),
        ("a b c", TWO_OR_FOUR, {"x": "a b"}),
        ("a b c d e", TWO_OR_FOUR, {"x": "a b c d"}),
        ("a b c", SizePolicy((2, 4), start_size=4), {}),
        ("a b c d", SizePolicy((2, 4), start_size=4), {"x": "a b c d"}),
    ],
)
def test_a_job_starts_with_an_allowed_size_of_at_least_its_start_size(
    names: str, policy: SizePolicy, expected: dict[str, str]
) -> None:
    view = picture(nodes(names), sized(policy=policy))
    assert where(view) == expected
    if not expected:
        assert f"needs {max(2, policy.start_size)} nodes" in planned(view).jobs["x"].reason


def test_it_grows_by_whole_sizes_and_says_what_it_lacks() -> None:
    view = running("a b", free="c")
    assert changes_nothing(planned(view))
    reason = "grows to 4 nodes, its next allowed size, once 2 more nodes can be had"
    assert reason in planned(view).jobs["x"].reason
    assert where(running("a b", free="c d")) == {"x": "a b c d"}


def test_a_job_whose_replicas_need_two_nodes_gets_and_gives_pairs() -> None:
    pairs = job("x", 2, 6, size_policy=SizePolicy(groups=Groups(8, slots=4)))

    def on(names: str, *others: SubmissionView, free: str = "") -> ClusterView:
        orders = {n: f"x:4:{1 + i}" for i, n in enumerate(names.split())}
        return picture(nodes(f"{names} {free}"), pairs, *others, orders=orders, running="x")

    assert changes_nothing(planned(on("a b", free="c")))
    assert where(on("a b", free="c d e")) == {"x": "a b c d"}
    lost = absent(on("a b c d"), "b", since_s=0.0)
    assert where(lost) == {"x": "a c"}
    assert "d is given back: its allowed sizes are 2, 4, 6, 8, ..." in planned(lost).jobs["x"].reason


def test_a_node_that_completes_no_size_goes_to_another_job() -> None:
    view = running("a b", job("y", 1, 2), free="c")
    assert where(view) == {"x": "a b", "y": "c"}


def test_a_lost_node_is_replaced_or_the_job_shrinks_to_a_size() -> None:
    lost = absent(running("a b c d"), "b", since_s=0.0)
    assert lost_at_s(lost.nodes["b"], POLICY) is not None
    assert where(lost) == {"x": "a c"}, "the newest order goes"
    assert "d is given back: its allowed sizes are 2, 4" in planned(lost).jobs["x"].reason
    assert where(absent(running("a b c d", free="e"), "b", since_s=0.0)) == {"x": "a c d e"}


def test_a_drained_node_leaves_a_size_behind() -> None:
    assert where(drained(running("a b c d"), "a")) == {"x": "b c"}


REPLICAS = (frozenset("ad"), frozenset("bc"))


@pytest.mark.parametrize(("node", "stays"), [("a", "b c"), ("b", "a d"), ("c", "a d"), ("d", "b c")])
def test_the_other_node_of_a_replica_is_given_back_with_a_drained_one(node: str, stays: str) -> None:
    """Whatever the age of its order: else the job would lose both replicas."""
    view = with_progress(running("a b c d"), "x", replicas=REPLICAS)
    assert where(drained(view, node)) == {"x": stays}
    assert where(absent(view, node, since_s=0.0)) == {"x": stays}
    forced = drained(view, node, force=True)
    assert where(forced) == {"x": stays}


def test_a_broken_replica_gives_back_before_whole_ones_that_the_job_could_lose() -> None:
    replicas = (frozenset("ad"), frozenset("be"), frozenset("cf"))
    view = with_progress(running("a b c d e f", policy=SizePolicy((2, 4, 6))), "x", replicas=replicas)
    assert where(drained(view, "a")) == {"x": "b c e f"}, "not f, though its order is the newest"


def test_another_job_gets_nodes_of_one_replica() -> None:
    view = with_progress(running("a b c d", job("y")), "x", replicas=(frozenset("ab"), frozenset("cd")))
    assert where(view) == {"x": "a b", "y": "d"}
    view = with_progress(running("a b c d", job("y", 2)), "x", replicas=REPLICAS)
    assert where(view) == {"x": "b c", "y": "a d"}


def test_nodes_of_both_replicas_are_not_left_at_once() -> None:
    view = drained(drained(with_progress(running("a b c d"), "x", replicas=REPLICAS), "a"), "b")
    assert where(view) == {"x": "a c d"}, "a is left once another replica can go on"


def test_the_last_replica_is_replaced_whole_before_a_drained_node_of_it_is_left() -> None:
    """The other node of that replica can't form one with a single replacement: the state would be gone first."""
    fixed = SizePolicy((2,))

    def only_replica(names: str, free: str, arrived: str) -> ClusterView:
        progress = {"replicas": (frozenset("ab"),), "arrived": frozenset(arrived)}
        return drained(with_progress(running(names, free=free, policy=fixed), "x", **progress), "a")

    assert where(only_replica("a b", "c d e", "ab")) == {"x": "a b c d"}, "a whole replica, and no node more"
    assert changes_nothing(planned(only_replica("a b c d", "e", "ab"))), "it has yet to copy the state"
    assert changes_nothing(planned(only_replica("a b c d", "e", "abc")))
    assert where(only_replica("a b c d", "e", "abcd")) == {"x": "c d"}
    one_free = only_replica("a b", "c", "ab")
    assert where(one_free) == {"x": "a b c"}
    assert "has no replacement yet: waits for 1 of 2 nodes" in planned(one_free).jobs["x"].reason
    other = with_progress(running("a b c d", job("y"), policy=fixed), "x", replicas=(frozenset("ab"),))
    waits = drained(with_progress(other, "x", arrived=frozenset("ab")), "a")
    assert where(waits) == {"x": "a b c d"}, "another job gets none of the replacements"


def test_a_job_grows_by_whole_replicas_while_its_last_one_is_replaced() -> None:
    view = with_progress(running("a b", free="c d e f", policy=TWO_OR_FOUR), "x", replicas=(frozenset("ab"),))
    assert where(drained(view, "a")) == {"x": "a b c d e f"}


def test_a_node_that_holds_a_part_of_all_replicas_is_kept() -> None:
    """Of three nodes with two slots each, for replicas of three workers."""
    policy = SizePolicy((2, 3))
    view = with_progress(running("a b c", policy=policy), "x", replicas=(frozenset("ab"), frozenset("bc")))
    assert where(drained(view, "a")) == {"x": "b c"}
    assert where(drained(view, "b")) == {"x": "a b c"}


def test_a_waiting_job_gets_single_nodes_and_the_rest_stays_a_size() -> None:
    assert where(running("a b c d", job("y"))) == {"x": "a b", "y": "d"}
    assert where(running("a b c d", job("y", 2))) == {"x": "a b", "y": "c d"}
    assert where(running("a b c d", job("y", 3))) == {"x": "a b c d"}, "never below its least size"


def test_what_one_job_gives_back_completes_the_size_of_an_earlier_one() -> None:
    orders = {n: f"x:4:{1 + i}" for i, n in enumerate("abc")} | {
        n: f"y:4:{4 + i}" for i, n in enumerate("def")
    }
    view = picture(nodes("a b c d e f"), sized(), sized("y"), orders=orders, running="x y")
    assert where(view) == {"x": "a b c f", "y": "d e"}


def test_a_job_that_lacks_nodes_is_filled_up_by_single_ones() -> None:
    view = running("a", free="b")
    assert where(view) == {"x": "a b"}
    least_four = SizePolicy((4, 8))
    orders = {"a": "x:4:1", "b": "x:4:2"}
    view = picture(nodes("a b c"), sized(policy=least_four), orders=orders, running="x")
    assert where(view) == {"x": "a b c"}, "it waits, and needs each of them"


def test_a_job_that_has_begun_needs_its_least_size_alone() -> None:
    view = running("a b", policy=SizePolicy((2, 4), start_size=4))
    assert changes_nothing(planned(view))
    not_begun = picture(
        nodes("a b"), sized(policy=SizePolicy((2, 4), start_size=4)), orders={"a": "x:4:1", "b": "x:4:2"}
    )
    assert where(not_begun) == {}, "it gives all nodes back"


def test_a_range_without_a_size_counts_as_it_is() -> None:
    """Of a client that checks no sizes."""
    odd = job("x", 3, 3, size_policy=TWO_OR_FOUR)
    assert where(picture(nodes("a b c"), odd)) == {"x": "a b c"}


def test_the_last_node_known_to_work_is_not_given_back() -> None:
    view = with_node(
        with_node(running("a b c"), "a", present=False, absent_since_s=1000.0),
        "b",
        present=False,
        absent_since_s=1000.0,
    )
    assert where(view)["x"].count(" ") == 2, "c alone is known to work, and a and b are not lost yet"
