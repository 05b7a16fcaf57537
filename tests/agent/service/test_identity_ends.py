"""The key pair of a job that ended is not in etcd any more, whichever way the job ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster_client import cluster_requests
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.job.create_or_join import remove_unused_identity
from bagua_agent.job.new_identity import make_identity
from bagua_agent.service.scheduling.scheduler import Scheduler
from bagua_contract import cluster_pb2 as pb
from bagua_contract import membership_pb2
from bagua_contract.records import PROTOCOL_VERSION
from tests.agent.cluster_state.test_odd_records import node, submission
from tests.agent.service.daemon_here import LEASE_S
from tests.lab.wait import eventually

DEADLINE_S = 30.0
ROOT = Path(__file__).parents[3]
KEYS = JobKeys("demo")


def put_job(store: Store) -> None:
    """As its first agent does."""
    store.put(KEYS.spec, membership_pb2.JobSpec(protocol=PROTOCOL_VERSION, nonce="n").SerializeToString())
    store.put(KEYS.identity, make_identity("demo").encode())


def put_agent(store: Store) -> None:
    store.put(
        KEYS.agent("a"), membership_pb2.Agent(agent_id="a", node_name="n0", slots=1).SerializeToString()
    )


@pytest.fixture
def scheduling(plain_store: Store) -> Iterator[list[str]]:
    said: list[str] = []
    plain_store.put(cluster_keys.node("n0"), node("n0"))
    cluster_requests.submit(plain_store, pb.Submission.FromString(submission("demo")))
    leased = LeasedKeys(plain_store, LEASE_S)
    scheduler = Scheduler(plain_store, leased, "n0", said.append, ClusterPolicy(settle_s=0.0))
    scheduler.start()
    yield said
    scheduler.stop()
    leased.close()


def await_no_pair(store: Store, said: list[str]) -> None:
    eventually(
        lambda: store.get(KEYS.identity) is None, DEADLINE_S, lambda: f"the pair is gone; said: {said}"
    )
    assert store.get(cluster_keys.outcome("demo")) is not None


def test_a_stopped_job_whose_agents_wrote_no_result(scheduling: list[str], plain_store: Store) -> None:
    """Killed, or lost with their nodes."""
    put_job(plain_store)
    cluster_requests.stop(plain_store, "demo")
    await_no_pair(plain_store, scheduling)


def test_an_agent_that_was_starting_when_its_job_was_stopped(
    scheduling: list[str], plain_store: Store
) -> None:
    """It writes the pair after the outcome; as long as it is there the pair is its own."""
    cluster_requests.stop(plain_store, "demo")
    eventually(lambda: plain_store.get(cluster_keys.outcome("demo")), DEADLINE_S, lambda: f"{scheduling}")
    put_agent(plain_store)
    put_job(plain_store)
    assert not remove_unused_identity(plain_store, KEYS) and plain_store.get(KEYS.identity) is not None
    plain_store.transact(deletes=[KEYS.agent("a")])
    await_no_pair(plain_store, scheduling)


def test_a_new_scheduler_removes_what_an_earlier_one_left(plain_store: Store) -> None:
    outcome = pb.JobOutcome(outcome=pb.JobOutcome.STOPPED).SerializeToString()
    plain_store.put(cluster_keys.outcome("demo"), outcome)
    plain_store.put(JobKeys("other").identity, b"of a job that goes on")
    put_job(plain_store)
    said: list[str] = []
    leased = LeasedKeys(plain_store, LEASE_S)
    scheduler = Scheduler(plain_store, leased, "n0", said.append, ClusterPolicy(settle_s=0.0))
    scheduler.start()
    try:
        await_no_pair(plain_store, said)
        assert plain_store.get(JobKeys("other").identity) is not None
    finally:
        scheduler.stop()
        leased.close()


def test_a_foreground_job_that_all_nodes_leave_before_it_began(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    """Two leave at once, so neither sees itself as the last one before its own key is gone."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it never begins')\n")
    words = [sys.executable, "-m", "bagua_launch", "--nnodes", "3", "--start-method", "spawn"]
    words += [
        "--rdzv-endpoint",
        plain_etcd.endpoint,
        "--rdzv-id",
        "demo",
        "--local-addr",
        "127.0.0.1",
        str(script),
    ]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    nodes = [subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        eventually(
            lambda: len(plain_store.get_prefix(KEYS.agents)[0]) == 2, DEADLINE_S, "both agents are there"
        )
        assert plain_store.get(KEYS.identity) is not None
        for one in nodes:
            one.send_signal(signal.SIGINT)
        told = [one.communicate(timeout=DEADLINE_S)[1] for one in nodes]
    finally:
        for one in nodes:
            one.kill()
            one.wait()
    assert plain_store.get(KEYS.result) is None, "no agent wrote a result"
    assert plain_store.get(KEYS.identity) is None, told
