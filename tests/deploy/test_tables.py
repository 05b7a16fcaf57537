"""The tables of docs/metrics.md and docs/dashboard.md have what agents and daemons serve, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from tests.deploy.test_monitoring import families

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "bagua_agent/dashboard/static"
OF_EVERY_SERIES = {"bagua_job", "node"}
OF_MANY = "bagua_net_*"  # all metrics that begin so; docs/bagua-net.md lists them
NAMED_VALUES = {"kind", "how", "use", "bound", "state", "outcome"}  # whose values the page lists
USES_BELOW = "bagua_time_seconds_total"  # a table of its own lists the values of its label


@dataclass(frozen=True, slots=True)
class Row:
    kind: str
    labels: frozenset[str]
    meaning: str


def section(page: str, heading: str) -> str:
    found = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert found, f"{page} has no section {heading}"
    return found


def rows(text: str) -> list[list[str]]:
    """The cells of a section's tables, without heads."""
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [cells for cells in table if cells[0] not in ("metric", "use", "part", "---")]


def printed() -> dict[str, Row]:
    """The metrics of the page's two tables by name. Of several in one row the last kind is that of the rest."""
    found = {}
    for heading in ("What is there", "Daemons and the queue"):
        for names, kinds, meaning in rows(section("docs/metrics.md", heading)):
            each = kinds.split(", ")
            for place, (name, labels) in enumerate(re.findall(r"`(bagua_[\w*]+)(?:\{([\w,]+)\})?`", names)):
                kind = each[min(place, len(each) - 1)].removesuffix("s")
                found[name] = Row(kind, frozenset(labels.split(",") if labels else ()), meaning)
    return found


def name_of(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def labels_of(family: Metric) -> set[str]:
    """Those of its series alone."""
    return {label for sample in family.samples for label in sample.labels} - OF_EVERY_SERIES - {"le"}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Metric]:
    return list(families(monkeypatch))


def of_net(served: list[Metric]) -> Iterator[Metric]:
    return (family for family in served if family.name.startswith(OF_MANY.removesuffix("*")))


def test_the_page_has_each_metric_with_its_type_and_labels(served: list[Metric]) -> None:
    others = {name_of(family): family for family in served if family not in list(of_net(served))}
    page = printed()
    assert page.keys() - {OF_MANY} == others.keys()
    for name, family in others.items():
        assert (page[name].kind, page[name].labels) == (family.type, labels_of(family)), name


def test_the_page_has_the_types_and_labels_of_bagua_nets_counters(served: list[Metric]) -> None:
    net = list(of_net(served))
    gauges = sum(family.type == "gauge" for family in net)
    assert gauges == 1 and {family.type for family in net} == {"gauge", "counter"}
    assert "| counters, one gauge |" in section("docs/metrics.md", "What is there")
    assert all(labels_of(family) == printed()[OF_MANY].labels for family in net)


def test_the_page_has_each_value_of_a_label_that_has_few(served: list[Metric]) -> None:
    page, compared = printed(), 0
    for family in served:
        for label in labels_of(family) & NAMED_VALUES:
            values = {sample.labels[label] for sample in family.samples}
            name = name_of(family)
            if name == USES_BELOW:
                there = {
                    cells[0].strip("`") for cells in rows(section("docs/metrics.md", "Where the time went"))
                }
            else:
                there = set(re.findall(r"`(\w+)`", page[name].meaning))
            assert there == values, f"{name}{{{label}}}"
            compared += 1
    assert compared > 5


@pytest.mark.parametrize(
    ("heading", "page"), [("What it shows", "index.html"), ("A cluster", "cluster.html")]
)
def test_the_parts_of_a_page_are_listed_in_their_order(heading: str, page: str) -> None:
    titles = re.findall(r"<h2[^>]*>(.+?)</h2>", (PAGES / page).read_text())
    parts = [part for cells in rows(section("docs/dashboard.md", heading)) for part in cells[0].split(", ")]
    assert parts == ["verdict", *(title.lower() for title in titles)]
