"""The metrics of a daemon and of the queue, read back as Prometheus reads them; health and readiness by a real loop."""

from __future__ import annotations

import json
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from bagua_agent.base.messages import HealthAsked
from bagua_agent.base.small_http import Answer
from bagua_agent.cluster.cluster_records import PROTOCOL
from bagua_agent.metrics.daemon_endpoint import DaemonAnswers, daemon_exposition, daemon_readiness
from bagua_agent.metrics.daemon_picture import (
    WAIT_BOUNDS_S,
    DaemonPicture,
    DaemonPictureAsked,
    QueuePicture,
    picture_of,
)
from bagua_agent.metrics.discovery import targets
from bagua_contract import cluster_pb2 as pb

NODE = pb.Node(
    protocol=PROTOCOL,
    node_name="h1",
    slots=4,
    units=[
        pb.Unit(job_id="run", state=pb.Unit.RUNNING, slots=[0, 1]),
        pb.Unit(job_id="old", state=pb.Unit.ENDED, slots=[2]),
    ],
)
QUEUE = QueuePicture(
    jobs={"queued": 2, "starting": 0, "running": 1, "stopping": 0},
    ended={"succeeded": 3, "failed": 1, "stopped": 0},
    nodes={"ready": 1, "trouble": 0, "drained": 0, "absent": 0},
    slots={"used": 2, "free": 2, "drained": 0, "trouble": 0, "absent": 0},
    oldest_wait_s=70.0,
    waits=(1, 2) + (0,) * (len(WAIT_BOUNDS_S) - 1),
    wait_sum_s=7.5,
)


def values(picture: DaemonPicture) -> dict[tuple[str, ...], float]:
    """By name and the values of further labels."""
    found = {}
    for family in text_string_to_metric_families(daemon_exposition(picture).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("node") == "h1"
            found[(sample.name, *labels.values())] = sample.value
    return found


def test_a_daemon_that_does_not_schedule_says_nothing_of_the_cluster() -> None:
    found = values(picture_of(NODE, in_touch=True))
    assert found["bagua_node_slots",] == 4 and found["bagua_node_slots_used",] == 2
    assert found["bagua_node_units", "running"] == 1 and found["bagua_node_units", "refused"] == 0
    assert found["bagua_daemon_schedules",] == 0 and found["bagua_daemon_etcd_up",] == 1
    assert not any(name.startswith("bagua_cluster") for name, *_ in found)


def test_the_scheduler_tells_of_the_queue() -> None:
    found = values(replace(picture_of(NODE, in_touch=False), queue=QUEUE))
    assert found["bagua_daemon_schedules",] == 1 and found["bagua_daemon_etcd_up",] == 0
    assert found["bagua_cluster_jobs", "queued"] == 2
    assert found["bagua_cluster_jobs_ended_total", "failed"] == 1
    assert found["bagua_cluster_slots", "free"] == 2 and found["bagua_cluster_nodes", "ready"] == 1
    assert found["bagua_cluster_oldest_wait_seconds",] == 70.0
    assert found["bagua_cluster_wait_seconds_bucket", "1"] == 1
    assert found["bagua_cluster_wait_seconds_bucket", "+Inf"] == 3
    assert found["bagua_cluster_wait_seconds_sum",] == 7.5


def test_readiness_says_why_no_job_comes() -> None:
    ready = picture_of(NODE, in_touch=True)
    assert daemon_readiness(ready).status == 200
    assert b"etcd" in daemon_readiness(replace(ready, in_touch=False)).body
    assert b"1 fault" in daemon_readiness(replace(ready, troubles=1)).body
    assert daemon_readiness(None).status == 503


def test_a_loop_answers_for_itself() -> None:
    def loop(question: HealthAsked | DaemonPictureAsked) -> None:
        if isinstance(question, HealthAsked):
            question.answered.set()
        else:
            question.answer.put(picture_of(NODE, in_touch=True))

    answers = DaemonAnswers(loop, lambda now: QUEUE)
    metrics, health = answers.answer("/metrics"), answers.answer("/healthz")
    assert metrics is not None and b'bagua_cluster_jobs{node="h1",state="queued"} 2.0' in metrics.body
    assert health is not None and health.status == 200
    assert answers.answer("/") is None
    without = answers.answer("/targets")
    assert without is not None and without.status == 404 and b"jobs.metrics" in without.body
    found = DaemonAnswers(loop, lambda now: QUEUE, lambda: b"[]").answer("/targets")
    assert found == Answer(200, b"[]", "application/json")


def test_targets_are_addresses_that_others_can_call() -> None:
    addresses = {
        "b": "10.0.0.5:4001",
        "a": "0.0.0.0:4000",
        "c": "[::]:4002",
        "d": ":4003",
        "e": "node-1:4004",
    }
    found = json.loads(targets(addresses, "h1", "10.0.0.9"))
    assert found[0] == {
        "targets": ["10.0.0.9:4000"],
        "labels": {"__meta_bagua_job": "a", "__meta_bagua_node": "h1"},
    }
    assert [group["targets"][0] for group in found[1:]] == [
        *("10.0.0.5:4001", "10.0.0.9:4002", "10.0.0.9:4003", "node-1:4004")
    ]
    assert json.loads(targets({"a": "[::]:1"}, "h1", "fd00::5"))[0]["targets"] == ["[fd00::5]:1"]
    assert targets({}, "h1", "10.0.0.9") == b"[]"
    beside = json.loads(targets({"a": "gar\0bled", "b": "10.0.0.5:1"}, "h1", "10.0.0.9"))
    assert [group["labels"]["__meta_bagua_job"] for group in beside] == ["b"], "the others keep their targets"
