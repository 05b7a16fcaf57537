"""A decision that can't be written, while the lease and so the scheduler's key stand: it decides again, or another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

import pytest

from bagua_agent.base.errors import StoreUnavailable, UserError
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import PROTOCOL, read_orders
from bagua_agent.cluster_client import cluster_requests
from bagua_agent.cluster_state.cluster_picture import ClusterPicture
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Compare, Put, Store, Transaction
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.service.scheduling import scheduler as scheduling
from bagua_agent.service.scheduling.scheduler import Scheduler
from bagua_contract import cluster_pb2 as pb
from tests.lab.wait import eventually

LEASE_S = 60.0  # outlives every outage of this test


class TroubleWithOrders(Store):
    """etcd, but each write of orders meets the next trouble, until there are none."""

    troubles: Iterator[Exception] = iter(())
    met = 0

    def transact(
        self,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        timeout_s: float | None = None,
        delete_ranges: Sequence[KeyRange] = (),
        repeatable: bool = False,
    ) -> Transaction:
        if any(put.key.startswith(cluster_keys.ORDERS) for put in puts):
            trouble = next(self.troubles, None)
            if trouble is not None:
                self.met += 1
                raise trouble
        return super().transact(compares, puts, deletes, timeout_s, delete_ranges, repeatable)


@pytest.fixture
def store(plain_etcd: EmbeddedEtcd) -> Iterator[TroubleWithOrders]:
    made = TroubleWithOrders(StoreConfig((parse_endpoint(plain_etcd.endpoint),)))
    yield made
    made.close()


def submit(store: Store) -> None:
    """One node, and a job for it."""
    node = pb.Node(protocol=PROTOCOL, node_name="n0", slots=2)
    store.put(cluster_keys.node("n0"), node.SerializeToString())
    submission = pb.Submission(
        protocol=PROTOCOL, job_id="job", wanted=pb.Submission.RUN, min_nodes=1, max_nodes=1
    )
    cluster_requests.submit(store, submission)


def ordered(store: Store) -> list[str]:
    found = store.get(cluster_keys.orders("n0"))
    return [] if found is None else [order.job_id for order in read_orders(found.value)]


def test_it_goes_on_with_the_key_that_it_holds(store: TroubleWithOrders) -> None:
    said: list[str] = []
    leased = LeasedKeys(store, LEASE_S)
    scheduler = Scheduler(store, leased, "n0", said.append, ClusterPolicy(settle_s=0.0))
    submit(store)
    store.troubles = iter([StoreUnavailable("away, as the test wants")])
    try:
        scheduler.start()
        eventually(lambda: ordered(store) == ["job"], 20.0, lambda: f"the order stands; said: {said}", 0.05)
        assert store.met == 1, "there was an outage"
        assert said.count("this node schedules the cluster's jobs") == 2
    finally:
        scheduler.stop()
        leased.close()


class LateElection(TroubleWithOrders):
    """Puts the scheduler's key, and loses the answers about it until `answers` is set."""

    answers = False

    def transact(
        self,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        timeout_s: float | None = None,
        delete_ranges: Sequence[KeyRange] = (),
        repeatable: bool = False,
    ) -> Transaction:
        done = super().transact(compares, puts, deletes, timeout_s, delete_ranges, repeatable)
        if not self.answers and any(put.key == cluster_keys.SCHEDULER for put in puts):
            self.answers = True
            raise StoreUnavailable("no answer, as the test wants")
        return done


def test_one_whose_election_got_no_answer_leads_with_the_key(plain_etcd: EmbeddedEtcd) -> None:
    """The key is on its lease, so no other daemon could take it before the lease ends."""
    store = LateElection(StoreConfig((parse_endpoint(plain_etcd.endpoint),)))
    said: list[str] = []
    leased = LeasedKeys(store, LEASE_S)
    scheduler = Scheduler(store, leased, "n0", said.append, ClusterPolicy(settle_s=0.0))
    submit(store)
    try:
        scheduler.start()
        eventually(lambda: store.answers, 20.0, "an election without an answer")
        won = store.get(cluster_keys.SCHEDULER)
        eventually(lambda: ordered(store) == ["job"], 10.0, lambda: f"the order stands; said: {said}", 0.05)
        assert won == store.get(cluster_keys.SCHEDULER), "it goes on with the key that is there"
    finally:
        scheduler.stop()
        leased.close()
        store.close()


def test_one_whose_picture_is_wrong_reads_the_cluster_anew(
    store: TroubleWithOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a watch has missed a change: no event would arrive that could correct the view."""
    monkeypatch.setattr(scheduling, "TRY_AGAIN_S", 0.05)
    said: list[str] = []
    leased = LeasedKeys(store, LEASE_S)
    scheduler = Scheduler(store, leased, "n0", said.append, ClusterPolicy(settle_s=0.0))
    submit(store)
    pictures: list[ClusterPicture] = []

    class Picture(ClusterPicture):
        def __init__(self, since_s: float, complain: Callable[[str], None]) -> None:
            super().__init__(since_s, complain)
            pictures.append(self)

        def order_revision(self, node_name: str) -> int:
            return super().order_revision(node_name) + (self is pictures[0])

    monkeypatch.setattr(scheduling, "ClusterPicture", Picture)
    try:
        scheduler.start()
        eventually(lambda: ordered(store) == ["job"], 20.0, lambda: f"the order stands; said: {said}", 0.05)
        assert len(pictures) == 2
        assert any("the cluster is read anew" in line for line in said), said
    finally:
        scheduler.stop()
        leased.close()


def test_one_that_is_refused_lets_another_schedule(store: TroubleWithOrders) -> None:
    """Its lease is kept for the node's other keys, so without giving it up it would hold the key for good."""
    denied = TroubleWithOrders(store.config)
    denied.troubles = repeat(UserError("etcd denies it, as the test wants"))
    said: dict[str, list[str]] = {"n0": [], "n1": []}
    leases = {"n0": LeasedKeys(denied, LEASE_S), "n1": LeasedKeys(store, LEASE_S)}
    policy = ClusterPolicy(settle_s=0.0)
    first = Scheduler(denied, leases["n0"], "n0", said["n0"].append, policy)
    second = Scheduler(store, leases["n1"], "n1", said["n1"].append, policy)
    submit(store)
    try:
        first.start()
        eventually(lambda: any("can't schedule" in line for line in said["n0"]), 20.0, lambda: f"{said}")
        second.start()
        eventually(lambda: ordered(store) == ["job"], 20.0, lambda: f"the other one schedules; said: {said}")
    finally:
        for scheduler in (first, second):
            scheduler.stop()
        for lease in leases.values():
            lease.close()
        denied.close()


def test_one_that_meets_a_bug_lets_another_schedule(
    store: TroubleWithOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*_: object) -> None:
        raise ZeroDivisionError("as the test wants")

    monkeypatch.setattr(scheduling, "plan", plan)
    said: list[str] = []
    leased = LeasedKeys(store, LEASE_S)
    scheduler = Scheduler(store, leased, "n0", said.append, ClusterPolicy(settle_s=0.0))
    try:
        scheduler.start()
        eventually(lambda: any("a bug" in line for line in said), 20.0, lambda: f"{said}")
        eventually(lambda: store.get(cluster_keys.SCHEDULER) is None, 20.0, "its key is free")
    finally:
        scheduler.stop()
        leased.close()
