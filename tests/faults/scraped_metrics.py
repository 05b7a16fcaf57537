"""Scrapes the metrics of a test's agent, as Prometheus does."""

from __future__ import annotations

import re
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.faults.job import DEADLINE_S, Node
from tests.lab.wait import eventually


def get(port: str, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def said(port: str, path: str) -> str:
    """As `get`, of an answer with an error's status too: a probe may come before the agent has heard of a step."""
    try:
        return get(port, path)
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.code} {error.read().decode()}"


def scrape(port: str, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The values of one metric, by these labels."""
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for family in text_string_to_metric_families(get(port, "/metrics"))
        for sample in family.samples
        if sample.name == name
    }


def port_of(node: Node) -> str:
    node.await_line("metrics at port")
    found = re.search(r"metrics at port ([0-9]+)", node.log)
    assert found is not None
    return found[1]


def await_uses(port: str, uses: set[str]) -> None:
    """Until the worker in slot 0 has spent time on all of these: it reports a few times a second."""

    def told() -> bool:
        spent = scrape(port, "bagua_time_seconds_total", "slot", "use")
        return uses <= {use for (slot, use), seconds in spent.items() if slot == "0" and seconds > 0}

    eventually(
        told, DEADLINE_S, lambda: f"{uses} in {scrape(port, 'bagua_time_seconds_total', 'slot', 'use')}"
    )
