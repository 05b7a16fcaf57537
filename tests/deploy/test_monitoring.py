"""The alert rules and the dashboards: their queries parse, name what agents and daemons serve, and show all of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import ClusterView
from bagua_agent.cluster.scheduling import plan
from bagua_agent.metrics import endpoint
from bagua_agent.metrics.daemon_endpoint import daemon_exposition
from bagua_agent.metrics.daemon_picture import picture_of
from bagua_agent.metrics.job_picture import JobPicture, WorkerPicture
from bagua_agent.service.scheduling.queue_account import QueueAccount
from bagua_contract import cluster_pb2 as pb
from bagua_contract import session_pb2
from bagua_contract.time_use import STEP_TIME_BOUNDS_S
from tests.deploy.dashboards import ALERTS, DASHBOARDS, shown_queries

COUNTERS_OF_NET = Path(__file__).parents[2] / "bagua_core" / "net" / "plugin" / "counters.h"


def queries() -> Iterator[str]:
    yield from ALERTS.values()
    yield from all_shown()


def all_shown() -> Iterator[str]:
    for path in DASHBOARDS:
        yield from shown_queries(path)


def families(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metric]:
    """Every metric that an agent or a daemon can have, as Prometheus reads it."""
    net = re.findall(
        r"\b([a-z_]+)[,;]",
        re.sub(r"//.*", "", COUNTERS_OF_NET.read_text()).split("struct Counters")[1].split("};")[0],
    )
    monkeypatch.setattr(endpoint, "read", lambda pid: dict.fromkeys(net, 1))
    progress = session_pb2.Progress(
        metrics={"loss": 1.0},
        spent_s={"step": 1.0},
        step_counts=[1] * (len(STEP_TIME_BOUNDS_S) + 1),
        total_steps=1,
        steps_per_s=1.0,
        step_samples=1,
        gradient_bytes=1,
        sent_bytes=1,
        algorithm="bytegrad",
        interface="eth0",
    )
    picture = JobPicture(
        job_id="$job",
        node_name="h1",
        leads=True,
        generation=1,
        world_size=1,
        nodes=1,
        wanted=(1, 1),
        workers=(WorkerPicture(0, 1, 0, progress, replica_rank=0, shard_rank=0),),
        generations={},
        exits={},
        store_answers=True,
        store_outages=0,
        store_away_s=0.0,
        trials=1,
        present_nodes=1,
    )
    account = QueueAccount()
    view = ClusterView()
    account.decided(view, plan(view, 0.0, ClusterPolicy()), 0.0)
    daemon = replace(picture_of(pb.Node(node_name="h1"), in_touch=True), queue=account.picture(0.0))
    for text in endpoint.exposition(picture).decode(), daemon_exposition(daemon).decode():
        for family in text_string_to_metric_families(text):
            assert family.samples, f"{family.name} is of no picture here"
            yield family


def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, set[str]]]:
    """Every series that an agent or a daemon can have: its labels' values by name."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in families(monkeypatch):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def selectors(node: object) -> Iterator[promql_parser.VectorSelector]:
    """Every selector of a parsed query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for name in ("expr", "lhs", "rhs", "param", "vector_selector", "vs"):
        if (below := getattr(node, name, None)) is not None:
            yield from selectors(below)
    for below in getattr(node, "args", None) or ():
        yield from selectors(below)


def test_every_query_names_series_that_an_agent_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    there = served(monkeypatch)
    named = set()
    for query in queries():
        found = list(selectors(promql_parser.parse(query)))
        assert {s.name for s in found} == set(re.findall(r"\bbagua_[a-z_]+", query)) - {"bagua_job"}, query
        for selector in found:
            assert selector.name in there, f"{selector.name} in {query}"
            named.add(selector.name)
            for matcher in selector.matchers.matchers:
                values = there[selector.name].get(matcher.name)
                assert values is not None, f"{selector.name} has no label {matcher.name}: {query}"
                if matcher.op == promql_parser.MatchOp.Equal:
                    assert matcher.value in values, f"{matcher.name}={matcher.value} is never served: {query}"
    assert len(named) > 10


def test_labels_that_a_query_groups_by_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there = served(monkeypatch)
    for query in queries():
        series = [there[s.name] for s in selectors(promql_parser.parse(query))]
        for group in re.findall(r"by \(([^)]*)\)", query):
            for label in group.split(", "):
                assert any(label in labels for labels in series), f"{label} in {query}"


# What no panel shows, and why.
NOT_SHOWN = {
    "bagua_generation": "a number without a scale; panels show the changes, by kind",
    "bagua_restart_mode": "alerts tell the modes apart by it; the mode of a job does not change",
    "bagua_leader": "an alert says that there is none; which node leads matters to nothing that a panel shows",
    "bagua_worker_rank": "a place, for joins with series of a slot",
    "bagua_worker_replica": "as bagua_worker_rank",
    "bagua_worker_shard": "as bagua_worker_rank",
    "bagua_net_bytes_received_total": "the sum of what the others send",
    "bagua_net_messages_sent_total": "bytes show the load; for a closer look at one worker",
    "bagua_net_messages_received_total": "as messages_sent",
    "bagua_net_chunks_sent_total": "as messages_sent",
    "bagua_net_connections_opened_total": "for a closer look at one worker",
    "bagua_net_connections_open": "for a closer look at one worker",
    "bagua_net_strangers_total": "for a closer look at one worker",
    "bagua_net_failures_total": "a failed communicator is a failover, which a panel shows by kind",
}


def test_every_series_is_on_a_panel_or_has_a_reason_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {s.name for query in all_shown() for s in selectors(promql_parser.parse(query))}
    buckets = {name.removesuffix("_bucket") for name in shown if name.endswith("_bucket")}
    shown |= {f"{name}_{part}" for name in buckets for part in ("count", "sum")}
    there = served(monkeypatch).keys()
    assert there - shown - NOT_SHOWN.keys() == set(), "add a panel in deploy/monitoring, or a reason here"
    assert NOT_SHOWN.keys() <= there - shown, "a reason for what is shown, or is not served any more"


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=lambda dashboard: dashboard["uid"])
def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken and x < 24, panel["title"]
                taken.add((x, y))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
