"""A scheduler whose decision could not be written, while its lease and so its key stand, decides again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import PROTOCOL, read_orders
from bagua_agent.cluster_client import cluster_requests
from bagua_agent.errors import StoreUnavailable
from bagua_agent.service.scheduler import Scheduler
from bagua_agent.store import cluster_keys
from bagua_agent.store.client import Compare, Put, Store, Transaction
from bagua_agent.store.connection import StoreConfig
from bagua_agent.store.embedded import EmbeddedEtcd
from bagua_agent.store.endpoints import parse_endpoint
from bagua_agent.store.leased_keys import LeasedKeys
from bagua_contract import cluster_pb2 as pb
from tests.lab.wait import eventually

LEASE_S = 60.0  # outlives every outage of this test


class AwayForOrders(Store):
    """etcd, but away for the first write of orders."""

    outages = 0

    def transact(
        self,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> Transaction:
        if not self.outages and any(put.key.startswith(cluster_keys.ORDERS) for put in puts):
            self.outages += 1
            raise StoreUnavailable("away, as the test wants")
        return super().transact(compares, puts, deletes, timeout_s)


@pytest.fixture
def store() -> Iterator[AwayForOrders]:
    etcd = EmbeddedEtcd.start()
    made = AwayForOrders(StoreConfig((parse_endpoint(etcd.endpoint),)))
    yield made
    made.close()
    etcd.stop()


def test_it_goes_on_with_the_key_that_it_holds(store: AwayForOrders) -> None:
    said: list[str] = []
    leased = LeasedKeys(store, LEASE_S)
    scheduler = Scheduler(store, leased, "n0", said.append, ClusterPolicy(settle_s=0.0))
    node = pb.Node(protocol=PROTOCOL, node_name="n0", slots=2)
    store.put(cluster_keys.node("n0"), node.SerializeToString())
    submission = pb.Submission(
        protocol=PROTOCOL, job_id="job", wanted=pb.Submission.RUN, min_nodes=1, max_nodes=1
    )
    cluster_requests.submit(store, submission)
    try:
        scheduler.start()
        found = eventually(
            lambda: store.get(cluster_keys.orders("n0")),
            20.0,
            lambda: f"the order stands; said: {said}",
            0.05,
        )
        assert found is not None and [order.job_id for order in read_orders(found.value)] == ["job"]
        assert store.outages == 1, "there was an outage"
        assert said.count("this node schedules the cluster's jobs") == 2
    finally:
        scheduler.stop()
        leased.close()
