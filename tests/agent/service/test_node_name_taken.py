"""Two daemons of one node's name, as hosts made from one image have: one alone carries out the orders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.service.node.own_name import NameTaken
from bagua_contract import cluster_pb2 as pb
from tests.agent.cluster_state.test_odd_records import StartedUnits, orders, submission
from tests.agent.service.daemon_here import NODE, running_daemon
from tests.lab.wait import eventually

DEADLINE_S = 20.0
KEY = cluster_keys.node(NODE)


@pytest.fixture
def other_store(plain_etcd: EmbeddedEtcd) -> Iterator[Store]:
    made = Store(StoreConfig((parse_endpoint(plain_etcd.endpoint),)))
    yield made
    made.close()


def order(store: Store, job_id: str) -> None:
    store.put(cluster_keys.submission(job_id), submission(job_id))
    store.put(cluster_keys.orders(NODE), orders(job_id))


def test_the_second_daemon_of_a_name_starts_no_unit_and_names_the_first(
    plain_etcd: EmbeddedEtcd, plain_store: Store, other_store: Store, tmp_path: Path
) -> None:
    one, other = StartedUnits(), StartedUnits()
    ends: list[BaseException] = []
    with running_daemon(plain_etcd, plain_store, tmp_path / "one", units=one):
        order(plain_store, "good")
        eventually(one.found, DEADLINE_S, "the job runs on the first")
        with running_daemon(
            plain_etcd, other_store, tmp_path / "other", units=other, boot_id="another", ends=ends
        ) as said:
            eventually(lambda: ends or other.found(), DEADLINE_S, lambda: f"the second ends; it said {said}")
    assert not other.found(), "a slot of the order is used on two hosts"
    [error] = ends
    assert "127.0.0.1:1" in str(error) and "node.name" in str(error)


def record(boot_id: str) -> bytes:
    return pb.Node(
        protocol=1, node_name=NODE, address="127.0.0.1:1", slots=1, boot_id=boot_id
    ).SerializeToString()


def await_own(store: Store, lease_id: int, said: list[str]) -> None:
    """The node's key has a daemon's record, on another lease than `lease_id`."""
    eventually(
        lambda: (found := store.get(KEY)) is not None and found.lease_id != lease_id,
        DEADLINE_S,
        lambda: f"the daemon's record; it said {said}",
    )


def test_a_daemon_that_starts_again_takes_the_record_of_its_last_run_over_at_once(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    lease = plain_store.lease_grant(60)
    plain_store.put(KEY, record("boot"), lease.lease_id)
    with running_daemon(plain_etcd, plain_store, tmp_path) as said:
        await_own(plain_store, lease.lease_id, said)


def test_a_host_that_was_booted_again_waits_for_the_end_of_its_last_lease(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    lease = plain_store.lease_grant(2)
    plain_store.put(KEY, record("boot before"), lease.lease_id)
    with running_daemon(plain_etcd, plain_store, tmp_path) as said:
        await_own(plain_store, lease.lease_id, said)


def test_a_daemon_is_stopped_while_it_waits_for_its_name(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    plain_store.put(KEY, record("another"), plain_store.lease_grant(60).lease_id)
    ends: list[BaseException] = []
    with running_daemon(plain_etcd, plain_store, tmp_path, ends=ends):
        pass  # its end is asserted there
    found = plain_store.get(KEY)
    assert not ends and found is not None and found.value == record("another")


def test_a_daemon_whose_name_was_taken_while_it_was_out_of_touch_ends(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    ends: list[BaseException] = []
    with running_daemon(plain_etcd, plain_store, tmp_path, ends=ends) as said:
        await_own(plain_store, 0, said)
        plain_store.put(KEY, record("another"), plain_store.lease_grant(60).lease_id)
        eventually(lambda: ends, DEADLINE_S, lambda: f"it ends; it said {said}")
    assert isinstance(ends[0], NameTaken)
    found = plain_store.get(KEY)
    assert found is not None and found.value == record("another"), "the other's record was written over"


def test_a_record_without_a_lease_in_the_nodes_key_ends_no_daemon(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    units = StartedUnits()
    with running_daemon(plain_etcd, plain_store, tmp_path, units=units) as said:
        await_own(plain_store, 0, said)
        plain_store.put(KEY, record("another"))
        await_own(plain_store, 0, said)
        order(plain_store, "good")
        eventually(units.found, DEADLINE_S, lambda: f"the job runs; the daemon said {said}")
