"""A submitted job of replicas across nodes: a killed host and a drained node take their replica along, and the job goes
on."""

from __future__ import annotations

import json
from typing import Any

from bagua_agent.cluster_client import cluster_requests
from bagua_contract.records import GenerationKind
from tests.cluster.cluster import DEADLINE_S, POLL_S, Cluster, SubmittedJob
from tests.cluster.conftest import MakeCluster
from tests.cluster.test_cluster_commands import JOB, Terminal
from tests.faults.test_replicas import SCRIPT
from tests.lab.wait import eventually

SAMPLES, EPOCHS = 1152, 2  # 96 steps
STEP_S = 1.0  # until the test lets the job hurry


def submit_replicas(terminal: Terminal, nodes: str) -> SubmittedJob:
    """Of two workers each, with one worker a node."""
    job = SubmittedJob(terminal.cluster, "sharded", SAMPLES, EPOCHS)
    size = ("--nnodes", nodes, "--nproc-per-node", "1", "--replica-size", "2")
    script = ("--samples", str(SAMPLES), "--epochs", str(EPOCHS), "--step-s", str(STEP_S))
    terminal.said(
        "submit", "--name", job.job_id, *size, "--ledger", str(job.records), *JOB,
        str(SCRIPT), "--out", str(job.out), *script,
    )  # fmt: skip
    return job


def replicas_in(status: list[dict[str, Any]]) -> list[set[str]]:
    """The nodes of each replica of the newest generation."""
    (job,) = status
    members = [r for r in job["replicas"] if r["state"] == "member"]
    return [{node for node, _ in r["workers"]} for r in members]


def undone_steps(cluster: Cluster, nodes: set[str]) -> int:
    """By the agents of nodes whose part in the job lasts: the log of an ended part is removed."""
    logs = [path for name in nodes for path in cluster.daemon(name).directory.rglob("agent.log")]
    assert len(logs) == len(nodes)
    return sum(path.read_text(errors="replace").count("did not happen") for path in logs)


def test_a_killed_host_and_a_drained_node_take_their_replica_along_and_the_other_goes_on(
    make_cluster: MakeCluster,
) -> None:
    terminal = Terminal(make_cluster(4))
    cluster: Cluster = terminal.cluster
    job = submit_replicas(terminal, "2:4")
    before = job.await_world(2)

    def status() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(terminal.said("status", job.job_id, "--json"))
        return found

    # not the one that holds the first node by name: of nodes with orders of one age that one is given back first
    stays, breaks = sorted(replicas_in(status()), key=min)
    leaver, mate = sorted(breaks)
    survivors = {name: cluster.daemon(name).workers() for name in stays}
    lost = cluster.daemon(mate)
    lost.host.kill_all()  # its daemon, its agent and its worker
    alone = job.await_world(1, after_step=before)
    assert replicas_in(status()) == [stays]
    assert {name: cluster.daemon(name).workers() for name in stays} == survivors, (
        "they go on in their processes"
    )
    assert any(record.kind is GenerationKind.FAILOVER for record in job.generations())
    job.await_world(1, after_step=alone)
    undone = undone_steps(cluster, stays)  # none if the host was lost between two steps
    lost.start()
    before = job.await_world(2, after_step=alone)
    assert sorted(replicas_in(status()), key=min) == [stays, breaks]
    cluster_requests.drain(cluster.store, leaver, force=False, reason="new disk")
    after = job.await_world(1, after_step=before)
    eventually(
        lambda: job.nodes == sorted(stays),
        DEADLINE_S,
        lambda: f"{mate} is given back\n{cluster.logs()}",
        POLL_S,
    )
    job.await_world(1, after_step=max(after, job.step))
    eventually(
        lambda: not any(u.alive for n in breaks for u in cluster.nodes()[n].units),
        DEADLINE_S,
        lambda: f"no unit is left on {leaver} and {mate}\n{cluster.logs()}",
        POLL_S,
    )
    (told,) = status()
    assert told["nodes"] == sorted(stays) and replicas_in([told]) == [stays]
    assert "grows to 4 nodes, its next allowed size, once 2 more nodes can be had" in told["reason"]
    assert undone_steps(cluster, stays) == undone, "leaves and joins cost no step"
    job.hurry()
    assert job.await_outcome().exit_code == 0
    job.check()
    assert len({line.step for line in job.ledger.lines if line.world_size == 1}) > 1
    cluster.await_idle()


def test_the_only_replica_is_replaced_whole_before_a_drained_node_is_left(make_cluster: MakeCluster) -> None:
    """The job may have two nodes, and has four while the new replica copies the state of the old one."""
    terminal = Terminal(make_cluster(4))
    cluster: Cluster = terminal.cluster
    job = submit_replicas(terminal, "2")
    before = job.await_world(1)
    old = set(job.nodes)
    leaver = max(old)
    cluster_requests.drain(cluster.store, leaver, force=False, reason="new disk")
    new = set(cluster.nodes()) - old
    eventually(
        lambda: set(job.nodes) == new, DEADLINE_S, lambda: f"{new} replace {old}\n{cluster.logs()}", POLL_S
    )
    job.await_world(1, after_step=max(before, job.step))
    job.hurry()
    assert job.await_outcome().exit_code == 0
    job.check()
    assert "did not happen" not in cluster.logs(), "the change of nodes costs no step"
    cluster.await_idle()
