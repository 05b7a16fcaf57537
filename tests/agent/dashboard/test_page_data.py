"""The data of the dashboard's page: JSON, the cause first, changes with their cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bagua_agent.dashboard.page_data import finite, goodput, page_data
from bagua_agent.history.job_history import EventKind, JobEvent, worker_ended_name
from bagua_agent.membership.view import FailureView
from bagua_agent.observation.job_facts import JobFacts
from bagua_agent.observation.series import JobSeries
from bagua_contract import membership_pb2 as pb
from tests.agent.observation.facts import NOW_S, agent, facts, generation, many_agents, worker

FORMED = JobEvent(
    "generation-3", EventKind.GENERATION_FORMED, "generation 3, now: 2 workers (-h2); lost h2", "h0", NOW_S - 9, 3,
    "FAILOVER", 2,
)  # fmt: skip
IN_FORCE = JobEvent("in-force-3", EventKind.GENERATION_IN_FORCE, "in force", "h0", NOW_S - 8, 3, lost_s=1.5)


def test_a_page_is_json_with_the_verdict_and_the_cost_of_changes() -> None:
    workers = (
        agent(0, worker(0, metrics={"loss": float("nan")}, total_steps=100)),
        agent(1, worker(1)),
        agent(2),
    )
    earlier = replace(FORMED, name="generation-2", generation=2, members=("h0: rank 0", "h2: rank 1"))
    seen = facts(events=(earlier, FORMED, IN_FORCE), agents=workers)
    series = JobSeries()
    series.take(seen)
    page = json.loads(json.dumps(finite(page_data(seen, series, "h0")), allow_nan=False))
    assert page["verdict"]["level"] == "good" and "2 workers on 2 nodes" in page["verdict"]["what"]
    assert (page["progress"]["step"], page["progress"]["total"]) == (10, 100)
    assert page["metrics"] == {"loss": None}
    [before, change] = page["generations"]
    assert before["members"] == ["h0: rank 0", "h2: rank 1"]
    assert (change["kind"], change["cost_s"], change["is_pending"]) == ("failover", 1.5, False)
    assert change["text"] == "2 workers (-h2); lost h2"
    assert change["members"] == ["h0: rank 0", "h1: rank 1"]
    assert [n["state"] for n in page["nodes"]] == ["trains", "trains", "standby"]


def test_nodes_that_are_not_asked_show_what_etcd_has() -> None:
    seen = facts(agents=many_agents(80), generation=generation(78))
    nodes = page_data(seen, JobSeries(), "")["nodes"]
    assert [n["state"] for n in nodes] == ["trains"] * 78 + ["standby"] * 2
    assert {n["etcd"] for n in nodes} == {True}


@pytest.mark.parametrize(
    ("served_by", "offered"),
    [
        ("h0", ["127.0.0.1:7465", "localhost:7466", "", "h3:7465", ""]),
        ("h2", ["", "", "[::1]:7465", "h3:7465", ""]),
        ("", ["", "", "", "h3:7465", ""]),
        ("elsewhere", ["", "", "", "h3:7465", ""]),
    ],
)
def test_a_loopback_address_is_offered_on_its_own_host_alone(served_by: str, offered: list[str]) -> None:
    """Elsewhere it leads to nothing, or to the page of another job."""
    agents = []
    addresses = ["127.0.0.1:7465", "localhost:7466", "[::1]:7465", "h3:7465", ""]
    hosts = ["10.0.0.1", "10.0.0.1", "[fd00::2]", "10.0.0.3", "10.0.0.1"]
    for number, (host, dashboard) in enumerate(zip(hosts, addresses, strict=True)):
        one = agent(number, address=f"{host}:{4000 + number}")
        assert one.node is not None
        one.node.dashboard = dashboard
        agents.append(one)
    nodes = page_data(facts(agents=tuple(agents)), JobSeries(), served_by)["nodes"]
    assert [node["dashboard"] for node in nodes] == offered


OLD = FailureView("w7", "h7", 9, True, True, "ValueError: bad", 5, global_rank=1, log_path="/logs")
KILLED = replace(OLD, worker_id="w1", node_name="h1", summary="killed by SIGKILL", order=900)
PEER = replace(OLD, worker_id="w0", node_name="h0", summary="a Gloo peer was lost: gloo/tcp", order=899)
A_DAY_S = 86_400


def roles(seen: JobFacts) -> list[tuple[str, str]]:
    series = JobSeries()
    series.take(seen)
    return [(f["node"], f["role"]) for f in page_data(seen, series, "")["failures"]]


def lost(failure: FailureView, at_s: float) -> JobEvent:
    name = worker_ended_name(failure.worker_id)
    return JobEvent(name, EventKind.WORKER_LOST, "lost", failure.node_name, at_s, worker_id=failure.worker_id)


def test_the_first_failure_comes_before_those_that_it_explains() -> None:
    events = lost(PEER, NOW_S), lost(KILLED, NOW_S)
    assert roles(facts(failures=(PEER, KILLED), events=events)) == [
        ("h1", "first failure"),
        ("h0", "explained by the first"),
    ]


def test_a_failure_of_another_day_is_not_the_cause_of_a_loss() -> None:
    """It would explain itself better than what happened now."""
    events = lost(OLD, NOW_S - A_DAY_S), lost(KILLED, NOW_S)
    assert roles(facts(failures=(OLD, KILLED), events=events)) == [
        ("h1", "first failure"),
        ("h7", "earlier"),
    ]
    events = lost(OLD, NOW_S - A_DAY_S), lost(PEER, NOW_S)
    assert roles(facts(failures=(OLD, PEER), events=events)) == [("h0", "first failure"), ("h7", "earlier")]


def test_without_a_recent_loss_the_newest_failures_are_explained_as_when_they_were_recent() -> None:
    before_s = NOW_S - A_DAY_S
    events = lost(OLD, before_s - A_DAY_S), lost(PEER, before_s - 1), lost(KILLED, before_s)
    explained = [("h1", "first failure"), ("h0", "explained by the first"), ("h7", "earlier")]
    assert roles(facts(failures=(OLD, PEER, KILLED), events=events)) == explained
    ended = pb.Result(outcome=pb.Result.SUCCEEDED)
    assert roles(facts(failures=(OLD, PEER, KILLED), events=events, result=ended)) == explained
    assert roles(facts(failures=(OLD, PEER), events=())) == [("h0", "first failure"), ("h7", "earlier")], (
        "the times are unknown"
    )


def test_the_failure_that_ended_the_job_explains_those_around_it_alone() -> None:
    ended = pb.Result(outcome=pb.Result.FAILED, failure=pb.Failure(worker_id="w1", cause=KILLED.summary))
    days_ago = replace(PEER, worker_id="w8", node_name="h8", order=6)
    before_s = NOW_S - A_DAY_S  # the end is of yesterday, too
    events = (
        lost(OLD, before_s - A_DAY_S),
        lost(days_ago, before_s - A_DAY_S),
        lost(PEER, before_s - 1),
        lost(KILLED, before_s),
    )
    assert roles(facts(failures=(OLD, days_ago, PEER, KILLED), events=events, result=ended)) == [
        ("h1", "first failure"),
        ("h0", "explained by the first"),
        ("h8", "earlier"),
        ("h7", "earlier"),
    ]
    assert roles(facts(failures=(OLD,), events=events[:1], result=ended)) == [
        ("", "first failure"),
        ("h7", "earlier"),
    ], "its own record is gone"


def test_goodput_leaves_out_start_and_standby_and_shows_unknown_uses() -> None:
    found = goodput({"start": 100.0, "step": 9.0, "failover": 0.5, "new_use": 0.5, "standby": 7.0})
    assert found["share"] == 0.9
    assert [part["use"] for part in found["parts"]] == ["step", "failover", "standby", "start", "new_use"]
    assert goodput({})["share"] is None


def test_the_network_of_a_worker_is_what_it_sent_since_the_look_before() -> None:
    def at(looks: int) -> JobFacts:
        sends = worker(
            0,
            step=10 * looks,
            sent_bytes=4000 * looks,
            gradient_bytes=1200,
            copied_bytes=70,
            copied_s=0.5,
            interface="eth0",
        )
        return facts(NOW_S + 2 * looks, agents=(agent(0, sends), agent(1, worker(1))))

    series = JobSeries()
    series.take(at(1))
    before = page_data(at(1), series, "h0")["workers"][0]["network"]
    assert (before["sent_per_s"], before["sent_a_step"]) == (None, None), "one look gives no rate"
    series.take(at(2))
    first, second = (w["network"] for w in page_data(at(2), series, "h0")["workers"])
    assert first == {
        "interface": "eth0",
        "sent_per_s": 2000.0,
        "sent_a_step": 400.0,
        "sent_bytes": 8000,
        "compression": 3.0,
        "net_bytes": None,
        "heal_bytes": 70,
        "heal_s": 0.5,
    }
    assert (second["interface"], second["compression"], second["sent_bytes"]) == (None, None, 0)
