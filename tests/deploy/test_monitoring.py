"""The alert rules and the dashboard: their queries parse, and name what an agent serves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bagua_agent.metrics import endpoint
from bagua_agent.metrics.job_picture import JobPicture, WorkerPicture
from bagua_contract import session_pb2
from bagua_contract.time_use import STEP_TIME_BOUNDS_S, TimeUse

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text())
ALERTS = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
COUNTERS_OF_NET = Path(__file__).parents[2] / "bagua_core" / "net" / "plugin" / "counters.h"


def queries() -> Iterator[str]:
    for group in ALERTS["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (each["expr"] for each in DASHBOARD["annotations"]["list"])


def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, set[str]]]:
    """Every series that an agent can have: its labels' values by name."""
    net = re.findall(
        r"\b([a-z_]+)[,;]", re.sub(r"//.*", "", COUNTERS_OF_NET.read_text()).split("struct Counters")[1]
    )
    monkeypatch.setattr(endpoint, "read", lambda pid: dict.fromkeys(net, 1))
    progress = session_pb2.Progress(
        metrics={"loss": 1.0},
        spent_s={use.value: 1.0 for use in TimeUse},
        step_counts=[1] * (len(STEP_TIME_BOUNDS_S) + 1),
    )
    picture = JobPicture(
        job_id="$job",
        node_name="h1",
        leads=True,
        generation=1,
        world_size=1,
        nodes=1,
        wanted=(1, 1),
        workers=(WorkerPicture(0, 1, 0, progress),),
        generations={"failover": 1, "planned": 1},
        exits={(0, how): 1 for how in ("ok", "error", "signal")},
        store_answers=True,
        store_outages=0,
        store_away_s=0.0,
    )
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(endpoint.exposition(picture).decode()):
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
        assert {s.name for s in found} == set(re.findall(r"\bbagua_[a-z_]+(?=[{\[)])", query)) - {
            "bagua_job"
        }, query
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


def test_panels_do_not_overlap() -> None:
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken and x < 24, panel["title"]
                taken.add((x, y))
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
