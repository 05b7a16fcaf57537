"""The first write of a process to an etcd that takes longer for an answer than an attempt has: the command succeeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from bagua_agent.cluster_client.started_jobs import request_stop
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.etcd.client import Store, StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.job.create_or_join import ensure_job, remove_unused_identity
from bagua_contract import membership_pb2 as pb
from tests.agent.etcd.conftest import Server, tcp_server
from tests.agent.etcd.slow_relay import MakeSlowRelay, make_slow_relay

__all__ = ["make_slow_relay", "tcp_server"]

KEYS = JobKeys("job")
CONFIG = JobConfig(job_id="job", command=WorkerCommand(CommandKind.SCRIPT, "train.py"), max_nodes=2)


@pytest.fixture
def quick(tcp_server: Server) -> Iterator[Store]:
    with closing(Store(StoreConfig((parse_endpoint(tcp_server.endpoint),)))) as store:
        yield store


@pytest.fixture
def slow(tcp_server: Server, make_slow_relay: MakeSlowRelay) -> Iterator[Store]:
    """A store of its own for one command; each answer takes longer than an attempt."""
    endpoint = parse_endpoint(make_slow_relay(tcp_server.endpoint, 0.5).endpoint)
    with closing(Store(StoreConfig((endpoint,), attempt_timeout_s=0.2, request_timeout_s=20.0))) as store:
        yield store


def test_a_job_is_begun_where_one_of_its_id_has_ended(quick: Store, slow: Store) -> None:
    before = ensure_job(quick, KEYS, CONFIG).spec
    quick.put(KEYS.result, pb.Result(outcome=pb.Result.SUCCEEDED).SerializeToString())
    found = ensure_job(slow, KEYS, CONFIG)
    assert found.spec.nonce != before.nonce and found.before is not None
    assert quick.get(KEYS.result) is None


def test_an_unused_key_pair_is_removed(quick: Store, slow: Store) -> None:
    ensure_job(quick, KEYS, CONFIG)
    assert remove_unused_identity(slow, KEYS)
    assert quick.get(KEYS.identity) is None


def test_a_job_that_was_started_by_hand_is_stopped(quick: Store, slow: Store) -> None:
    ensure_job(quick, KEYS, CONFIG)
    agent = pb.Agent(agent_id="a", node_name="n", slots=1, control_address="127.0.0.1:1")
    quick.put(KEYS.agent("a"), agent.SerializeToString())
    assert "stops at its next step boundary" in request_stop(slow, "job")
    assert quick.get(KEYS.stop) is not None
