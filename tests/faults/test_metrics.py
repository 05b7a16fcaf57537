"""What a job's metrics say of a lost worker, read as Prometheus reads them."""

from __future__ import annotations

import re
import signal
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.agent.metrics.otlp_receiver import OtlpReceiver, attributes
from tests.faults.conftest import MakeJob
from tests.faults.job import DEADLINE_S, Node
from tests.lab.wait import eventually


def get(port: str, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


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


@pytest.fixture
def collector() -> Iterator[OtlpReceiver | None]:
    """None without the extra otel."""
    if find_spec("opentelemetry") is None:
        yield None
        return
    receiver = OtlpReceiver()
    yield receiver
    receiver.stop()


def test_a_lost_worker_shows_in_exits_generations_and_lost_time(
    job: MakeJob, collector: OtlpReceiver | None
) -> None:
    one = job(nodes="1")
    options = ["--metrics-port", "0", *(["--otel", collector.url] if collector else [])]
    node = one.start(
        slots=2,
        options=options,
        failpoints="step.begin=kill@20#1",
        environment={"OTEL_METRIC_EXPORT_INTERVAL": "1000"},
    )
    port = port_of(node)
    one.await_world(2, after_step=one.await_world(1))
    assert node.says("did not happen"), "the worker was lost within a step"
    assert "global ranks [0, 1]" in get(port, "/readyz")
    assert scrape(port, "bagua_worker_exits_total", "slot", "how") == {("1", "signal"): 1.0}
    assert scrape(port, "bagua_generations_total", "kind")["failover",] >= 1.0
    await_uses(port, {"start", "step", "failed_step", "failover", "switch"})
    assert scrape(port, "bagua_step_seconds_count", "slot")["0",] <= scrape(port, "bagua_step", "slot")["0",]
    one.finish()
    one.check(finished=2)
    if collector is not None:
        kinds = [attributes(e).get("bagua.generation_kind") for e in collector.events]
        assert "failover" in kinds, f"{[e.event_name for e in collector.events]}"
        assert collector.events[-1].event_name == "bagua.job_ended"
        exits = collector.newest("bagua_worker_exits")[frozenset({("slot", "1"), ("how", "signal")})]
        assert exits.as_double == 1.0


def test_checkpoints_and_the_wait_for_a_lost_node_are_uses_of_time(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    options = ["--metrics-port", "0", "--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "3"]
    one = job(endpoints=etcd.endpoint, nodes="2:2", options=options)
    staying, lost = one.start(), one.start()
    port = port_of(staying)
    both = one.await_world(2)
    lost.kill_agent()
    staying.await_line("waiting: 1 of 2 nodes")
    one.start()
    one.await_world(2, after_step=max(both, one.step))
    await_uses(port, {"failover", "checkpoint"})
    one.finish([0, -signal.SIGKILL, 0])
    one.check(finished=2)
