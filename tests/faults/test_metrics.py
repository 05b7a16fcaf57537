"""What a job's metrics say of a lost worker, read as Prometheus reads them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.agent.metrics.otlp_receiver import OtlpReceiver, attributes
from tests.docs.printed import printed, printed_lines
from tests.faults.conftest import MakeJob
from tests.faults.job import DEADLINE_S, Job
from tests.faults.scraped_metrics import await_uses, get, port_of, said, scrape
from tests.lab.wait import eventually

SERVED_S = 10.0  # while the job lasts


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
    options = ["--metrics-port", "0"]
    if collector:
        options += printed("docs/metrics.md", "--otel", {"http://collector:4318": collector.url})[:-1]
    node = one.start(
        slots=2,
        options=options,
        failpoints="step.begin=kill@20#1",
        environment={"OTEL_METRIC_EXPORT_INTERVAL": "1000"},
    )
    port = port_of(node)
    one.await_world(2, after_step=one.await_world(1))
    assert node.says("did not happen"), "the worker was lost within a step"
    eventually(
        lambda: "global ranks [0, 1]" in said(port, "/readyz"), SERVED_S, lambda: said(port, "/readyz"), 0.1
    )
    if shutil.which("curl"):
        line = ["curl", "--silent", "--fail", *printed("docs/metrics.md", "curl", {"9464": port})]
        done = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        assert "\nbagua_world_size{" in done.stdout
    eventually(
        lambda: not_served(one, port) == [], SERVED_S, lambda: f"not served: {not_served(one, port)}", 0.1
    )
    exited = scrape(port, "bagua_worker_exits_total", "slot", "how")
    assert {of for of, count in exited.items() if count} == {("1", "signal")} and exited["0", "ok"] == 0.0
    assert scrape(port, "bagua_generations_total", "kind")["failover",] >= 1.0
    await_uses(port, {"start", "step", "failed_step", "failover", "switch"})
    assert scrape(port, "bagua_samples_total", "slot")["0",] > 0
    assert scrape(port, "bagua_step_seconds_count", "slot")["0",] <= scrape(port, "bagua_step", "slot")["0",]
    one.finish()
    one.check(finished=2)
    if collector is not None:
        kinds = [attributes(e).get("bagua.generation_kind") for e in collector.events]
        assert "failover" in kinds, f"{[e.event_name for e in collector.events]}"
        assert collector.events[-1].event_name == "bagua.job_ended"
        exits = collector.newest("bagua_worker_exits")
        assert exits[frozenset({("slot", "1"), ("how", "signal")})].as_double == 1.0
        assert exits[frozenset({("slot", "0"), ("how", "ok")})].as_double == 1.0, "sent at the very end"


def not_served(one: Job, port: str) -> list[str]:
    """Names and labels that the page shows and the node does not."""
    text = printed_lines("docs/metrics.md", "a scrape").replace('"demo"', f'"{one.job_id}"')
    shown = [
        line.rpartition(" ")[0] for line in text.replace('"vm"', f'"{os.uname().nodename}"').splitlines()
    ]
    served = {line.rpartition(" ")[0] for line in get(port, "/metrics").splitlines()}
    return [series for series in shown if series and series not in served]


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
