"""The page that a daemon serves: nodes, the queue with its reason, the jobs' own pages and metrics, a drain and a lost
node."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from contextlib import closing
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bagua_agent.cluster_client import cluster_requests
from tests.agent.metrics.otlp_receiver import OtlpReceiver, attributes
from tests.cluster.cluster import DEADLINE_S, Cluster, Daemon
from tests.cluster.conftest import MakeCluster
from tests.lab.forward import Forward
from tests.lab.wait import eventually

PORT = 7465
OTEL_PORT = 4318
TIMEOUT_S = 40.0


def get(endpoint: str, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://{endpoint}{path}", timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def metrics(endpoint: str) -> dict[tuple[str, ...], float]:
    """By name and the values of labels."""
    families = text_string_to_metric_families(get(endpoint, "/metrics")[1].decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def await_page(endpoint: str, path: str, text: str, cluster: Cluster) -> Any:
    """The page whose verdict contains `text`."""
    newest: list[Any] = [None]

    def found() -> bool:
        newest[0] = json.loads(get(endpoint, path)[1])
        return text in newest[0].get("verdict", {}).get("what", "")

    eventually(found, DEADLINE_S, lambda: f"{text!r} in {newest[0]}\n{cluster.logs()}", 0.2)
    return newest[0]


def targets(endpoint: str) -> dict[str, str]:
    """HOST:PORT at which each job of a node serves its metrics, as Prometheus discovers it."""
    with urllib.request.urlopen(f"http://{endpoint}/targets", timeout=TIMEOUT_S) as answer:
        assert answer.headers["Content-Type"] == "application/json", "Prometheus takes no other"
        found = json.load(answer)
    return {group["labels"]["__meta_bagua_job"]: target for group in found for target in group["targets"]}


def await_steps_at_target(daemon: Daemon, endpoint: str) -> None:
    """A scrape of the job's discovered target gives its steps on this node."""

    def steps() -> float:
        try:
            host, port = targets(endpoint)["run"].split(":")
            with closing(Forward(daemon.host, (host, int(port)))) as forward:
                return metrics(forward.endpoint).get(("bagua_step", "run", daemon.name, "0"), 0.0)
        except (KeyError, OSError):
            return 0.0  # its daemon has just started

    eventually(
        steps, DEADLINE_S, lambda: f"steps at the target of {daemon.name}\n{daemon.cluster.logs()}", 0.2
    )


def await_collected(collector: OtlpReceiver, nodes: set[str]) -> None:
    """Metrics of the submitted job from each node, and its events."""

    def came() -> bool:
        about = [attributes(of.resource) for of in list(collector.metrics)]
        named = {a["bagua.node"] for a in about if a["bagua.job"] == "run"}
        events = {event.event_name for event in collector.events}
        return named == nodes and "bagua.generation_in_force" in events

    eventually(came, DEADLINE_S, lambda: f"OTLP: {[e.event_name for e in collector.events]}", 0.2)


def test_a_daemon_shows_its_cluster(make_cluster: MakeCluster) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install bagua-elastic[otel]")
    cluster = make_cluster(2, dashboard=f"{PORT}", otel_port=OTEL_PORT)
    first, second = cluster.daemons
    collector = OtlpReceiver(listener=cluster.lab.hosts[0].listen(OTEL_PORT))
    first.await_line(f"the cluster's page is at http://127.0.0.1:{PORT}/")
    with closing(Forward(first.host, ("127.0.0.1", PORT))) as forward:
        at = forward.endpoint
        assert targets(at) == {}
        assert b"cluster.js" in get(at, "/")[1]
        page = await_page(at, "/api/page", "No job runs on the 2 nodes", cluster)
        assert [node["health"] for node in page["nodes"]] == ["ready", "ready"]
        run = cluster.submit("run", (2, 2))
        run.await_world(2)
        cluster.submit("next", (1, 1))
        page = await_page(at, "/api/page", "1 job runs on 2 of 2 nodes; 1 job waits, next first", cluster)
        (waiting,) = page["queue"]
        assert waiting["position"] == 1 and waiting["fits"] and "waits for 1 of 1 node" in waiting["why"]
        assert page["served_by"] == first.name and page["scheduler"] in (first.name, second.name)

        def paced() -> bool:
            (job,) = json.loads(get(at, "/api/page")[1])["jobs"]
            return bool(job["step"])

        eventually(paced, DEADLINE_S, "an agent of the job has said how far it is", 0.2)
        await_steps_at_target(first, at)
        await_collected(collector, {first.name, second.name})
        assert b"app.js" in get(at, "/job/run/")[1]
        of_job = await_page(at, "/job/run/api/page", "trains with 2 workers on 2 nodes", cluster)
        agent = of_job["workers"][0]["agent"]
        assert "kept" in json.loads(get(at, f"/job/run/api/log/{agent}/0/out/0")[1])
        assert get(at, f"/job/run/api/stacks/{agent}/0")[0] == 403, "only the page asks for stacks"
        assert "has not begun" in json.loads(get(at, "/job/next/api/page")[1])["problem"]
        assert "has not begun" in json.loads(get(at, "/job/../api/page")[1])["problem"]
        assert get(at, "/job//api/page")[0] == 404

        found = metrics(at)
        assert (
            found["bagua_node_slots_used", first.name] == 1 and found["bagua_daemon_etcd_up", first.name] == 1
        )
        assert get(at, "/healthz")[0] == 200 and get(at, "/readyz")[0] == 200
        if cluster.scheduler() == first.name:
            assert found["bagua_cluster_jobs", first.name, "queued"] == 1
            assert found["bagua_cluster_slots", first.name, "used"] == 2
        else:
            assert not any(name.startswith("bagua_cluster") for name, *_ in found)

        cluster_requests.drain(cluster.store, second.name, force=False, reason="new disk")
        page = await_page(at, "/api/page", "1 job waits", cluster)
        eventually(
            lambda: json.loads(get(at, "/api/page")[1])["nodes"][1]["health"] == "draining",
            DEADLINE_S,
            "drains",
            0.2,
        )
        second.kill()
        page = await_page(at, "/api/page", f"Node {second.name} has been silent", cluster)
        assert page["nodes"][1]["health"] == "silent" and "run" in page["verdict"]["why"]
        second.start()
        with closing(Forward(second.host, ("127.0.0.1", PORT))) as of_second:
            await_steps_at_target(second, of_second.endpoint)
        cluster_requests.undrain(cluster.store, second.name)
        await_page(at, "/api/page", "1 job waits", cluster)
        (address,) = (first.directory / "state").rglob("run/metrics")
        address.write_text("garbled")
        assert targets(at) == {}
        first.await_line("'garbled' is no HOST:PORT; /targets leaves the job out")
        run.hurry()
        assert run.await_outcome().exit_code == 0
        ended: list[str] = []

        def has_ended() -> bool:
            ended[:] = [job["job"] for job in json.loads(get(at, "/api/page")[1])["ended"]]
            return ended == ["run"]

        eventually(has_ended, DEADLINE_S, lambda: f"run has ended: {ended}", 0.2)
        eventually(lambda: "run" not in targets(at), DEADLINE_S, "a job that has ended is no target", 0.2)
    collector.stop()
    first.stop()
