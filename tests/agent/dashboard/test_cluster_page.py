"""The data of the cluster's page: JSON, the queue in its order, slots that add up."""

from __future__ import annotations

import json
from dataclasses import replace

from bagua_agent.dashboard.cluster_page import asks, cluster_page
from bagua_agent.dashboard.page_data import finite
from bagua_agent.observation.job_paces import JobPace
from tests.agent.observation.cluster_facts_of import NOW_S, cluster, member, submitted

NODES = (
    member("h1", "run", "run"),
    member("h2", "run", state="drained", reason="new disk"),
    member("h3", state="drained"),
    member("h4", state="trouble", reason="full"),
    member("h5", "run", state="absent", absent_s=7.0),
)


def test_every_slot_is_counted_once() -> None:
    found = {part["use"]: part["slots"] for part in cluster_page(cluster(*NODES), "")["slots"]}
    assert found == {"used": 3, "free": 2, "drained": 7, "trouble": 4, "absent": 4}
    assert sum(found.values()) == sum(node.slots for node in NODES)


def test_a_page_is_json_with_the_queue_and_what_each_job_does() -> None:
    jobs = (
        submitted("late", "queued", position=2, submitter="eve\x1b[2J"),
        submitted("run", slots_per_node=2),
        submitted("first", "queued", position=1, priority=9),
        submitted("older", "ended", exit_code=0, ended_unix_s=NOW_S - 9),
        submitted("newer", "ended", exit_code=1, ended_unix_s=NOW_S - 3),
    )
    by_hand = (submitted("mine", by_hand=True), submitted("left", "absent", by_hand=True))
    facts = cluster(
        *NODES, jobs=jobs, by_hand=by_hand, paces={"run": JobPace(30, 100, 2.0)}, starts_in_s={"first": 35.0}
    )
    page = json.loads(json.dumps(finite(cluster_page(facts, "h1")), allow_nan=False))
    first, late = page["queue"]
    assert (first["job"], first["position"], first["starts_in_s"]) == ("first", 1, 35.0)
    assert (late["job"], late["position"], late["starts_in_s"]) == ("late", 2, None)
    assert late["submitter"] == "eve\\x1b[2J"
    assert [(j["job"], j["by_hand"], j["left_s"]) for j in page["jobs"]] == [
        ("run", False, 35.0),
        ("mine", True, None),
    ]
    assert [n["health"] for n in page["nodes"]] == ["ready", "draining", "drained", "trouble", "silent"]
    assert [j["job"] for j in page["ended"]] == ["newer", "older"]
    assert [j["job"] for j in page["absent"]] == ["left"]
    assert page["counts"] == {"nodes": 5, "ready": 1, "going": 2, "waiting": 2, "ended": 2}


def test_slots_of_a_unit_are_called_a_range_only_without_a_gap() -> None:
    units = (
        ("even", (6, 4, 0, 2), "running"),
        ("odd", (1, 3, 5, 7), "running"),
        ("all", (8, 9, 10), "running"),
    )
    (node,) = cluster_page(cluster(replace(member("h1"), jobs=units)), "")["nodes"]
    assert [unit["slots"] for unit in node["jobs"]] == ["0, 2, 4, 6", "1, 3, 5, 7", "8 to 10"]


def test_a_unit_that_has_ended_is_not_shown_beside_free_slots() -> None:
    units = (("over", (0,), "ended"), ("run", (1,), "running"), ("late", (2,), "leaving"))
    (node,) = cluster_page(cluster(replace(member("h1"), jobs=units)), "")["nodes"]
    assert [unit["job"] for unit in node["jobs"]] == ["run", "late"]


def test_what_a_job_asks_for() -> None:
    assert asks(submitted("a")) == "1 to 2 nodes"
    assert asks(submitted("a", min_nodes=1, max_nodes=1, slots_per_node=8)) == "1 node of 8 slots"
