"""What the verdict says of a cluster, what it gives as the reason, and what it advises."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bagua_agent.cluster.cluster_records import PROTOCOL, write_outcome
from bagua_agent.cluster.cluster_view import JobEnd, OutcomeView
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import KeyValue
from bagua_agent.observation.cluster_facts import ClusterFacts, ClusterWatch
from bagua_agent.observation.cluster_verdict import cluster_verdict
from bagua_agent.observation.verdict_parts import Level
from bagua_contract import cluster_pb2 as pb
from tests.agent.observation.cluster_facts_of import NOW_S, cluster, member, submitted

RUNS = submitted("run")
WAITS = submitted("next", "queued", position=1)
MISFIT = submitted("huge", "queued", position=2, fits=False)
FAILED = submitted("bad", "ended", exit_code=3, reason="failed: ValueError: bad", ended_unix_s=NOW_S - 60)
STOPPED = submitted("was", "ended", exit_code=143, reason="stopped: as asked", ended_unix_s=NOW_S - 60)
SILENT = member("h2", "run", state="absent", absent_s=20.0)
BUSY = member("h1", "run")
DRAINING = member("h3", "run", state="drained", reason="new disk")


@pytest.mark.parametrize(
    ("facts", "level", "what", "then"),
    [
        (cluster(scheduler=""), Level.WAITING, "No daemon runs in this cluster yet.", "bagua-agent serve"),
        (cluster(jobs=(WAITS,)), Level.BAD, "1 submitted job can't run", "bagua-agent serve"),
        (cluster(SILENT), Level.BAD, "No daemon is heard of.", "bagua-agent of these nodes"),
        (cluster(BUSY, scheduler=""), Level.BAD, "No daemon schedules", "daemons' logs"),
        (
            cluster(BUSY, SILENT, jobs=(RUNS, WAITS)),
            Level.WARNING,
            "Node h2 has been silent for 20 s.",
            "host",
        ),
        (
            cluster(BUSY, member("h4", state="trouble", reason="disk is full")),
            Level.WARNING,
            "Node h4 gets no jobs: disk is full",
            "bagua-agent check",
        ),
        (
            cluster(BUSY, jobs=(RUNS, FAILED)),
            Level.WARNING,
            "Job bad has failed: ValueError: bad",
            "bagua-launch logs bad",
        ),
        (
            cluster(BUSY, jobs=(RUNS, WAITS, MISFIT)),
            Level.WARNING,
            "Job huge can't start",
            "bagua-launch stop huge",
        ),
        (
            cluster(BUSY, jobs=(RUNS, WAITS)),
            Level.WAITING,
            "1 job runs on 1 of 1 node; 1 job waits, next first.",
            "starts once nodes are free",
        ),
        (
            cluster(BUSY, DRAINING, jobs=(RUNS, WAITS)),
            Level.WAITING,
            "1 job waits",
            "bagua-launch undrain h3",
        ),
        (
            cluster(BUSY, DRAINING, jobs=(RUNS,)),
            Level.WAITING,
            "h3 is being drained: run has yet to leave.",
            "--force",
        ),
        (cluster(BUSY, jobs=(RUNS, STOPPED)), Level.GOOD, "1 job runs on 1 of 1 node.", ""),
        (cluster(member("h1")), Level.GOOD, "No job runs on the 1 node.", "bagua-launch submit"),
    ],
)
def test_the_verdict(facts: ClusterFacts, level: Level, what: str, then: str) -> None:
    said = cluster_verdict(facts)
    assert said.level is level
    assert what in said.what and then in said.next
    assert said.why and "\n" not in said.what + said.why + said.next


def test_a_wait_has_the_schedulers_reason_and_the_expected_start() -> None:
    said = cluster_verdict(cluster(BUSY, jobs=(RUNS, WAITS), starts_in_s={"next": 240.0}))
    assert said.why == "It is queued for a reason. It is expected to start in 4 min."
    old = cluster(BUSY, jobs=(RUNS, submitted("old", "ended", exit_code=1, ended_unix_s=NOW_S - 3600)))
    assert cluster_verdict(old).level is Level.GOOD, "a failure of an hour ago is not what happens now"


class OneJob:
    """Its records in etcd, for those that only read."""

    def __init__(self) -> None:
        asked = pb.Submission(
            protocol=PROTOCOL, job_id="bad", nonce="n1", wanted=pb.Submission.RUN, min_nodes=1, max_nodes=1
        )
        self.records = {
            cluster_keys.submission("bad"): asked.SerializeToString(),
            cluster_keys.node("h1"): pb.Node(protocol=PROTOCOL, node_name="h1", slots=4).SerializeToString(),
            cluster_keys.SCHEDULER: pb.Scheduler(node_name="h1").SerializeToString(),
        }

    def fails(self, ended_unix_s: float) -> None:
        ended = OutcomeView(JobEnd.FAILED, 1, "ValueError")
        self.records[cluster_keys.outcome("bad")] = write_outcome(ended, ended_unix_s, "n1")

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        found = sorted(self.records.items())
        return [KeyValue(k, v, n, n) for n, (k, v) in enumerate(found, 1) if k.startswith(prefix)], 99


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_a_failure_is_mentioned_for_ten_minutes_whatever_the_schedulers_clock_says(ahead_s: float) -> None:
    store, said = OneJob(), list[str]()
    watch = ClusterWatch(cast("Any", store), said.append)
    watch.look(lambda: NOW_S)
    store.fails(NOW_S + ahead_s)
    found = watch.look(lambda: NOW_S + 1)
    assert not said
    assert "Job bad has failed: ValueError" in cluster_verdict(found).what
    assert cluster_verdict(watch.look(lambda: NOW_S + 700)).level is Level.GOOD
    watch.close()
