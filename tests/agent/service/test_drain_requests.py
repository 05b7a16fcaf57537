"""Two operators drain and undrain a node at once, and etcd answers late: neither gets a false answer."""

from __future__ import annotations

import pytest

from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.cluster.cluster_records import PROTOCOL
from bagua_agent.cluster_client import cluster_requests
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_contract import cluster_pb2 as pb
from tests.agent.service.meddled_store import Meddled, no_answer, with_long_timeouts

KEY = cluster_keys.drain("n0")


@pytest.fixture
def store(plain_store: Store) -> Meddled:
    node = pb.Node(protocol=PROTOCOL, node_name="n0", slots=2)
    plain_store.put(cluster_keys.node("n0"), node.SerializeToString())
    return Meddled(with_long_timeouts(plain_store))


def drain(store: Store, reason: str) -> str:
    return cluster_requests.drain(store, "n0", force=False, reason=reason)


def reason_of(store: Store) -> str | None:
    found = store.get(KEY)
    return None if found is None else str(pb.Drain.FromString(found.value).reason)


def test_a_drain_that_came_between_is_undone_too(store: Meddled, plain_store: Store) -> None:
    drain(plain_store, "mine")
    meddles = iter([lambda: drain(plain_store, "hers")])
    store.before = lambda: next(meddles, lambda: None)()
    assert cluster_requests.undrain(store, "n0") == "node 'n0' takes jobs again"
    assert store.transactions == 2, "the first was refused"
    assert reason_of(plain_store) is None


@pytest.mark.parametrize("drained", [False, True])
def test_what_was_done_without_an_answer_is_not_done_twice(
    store: Meddled, plain_store: Store, drained: bool
) -> None:
    store.after = no_answer
    if drained:
        drain(plain_store, "mine")
        assert cluster_requests.undrain(store, "n0") == "node 'n0' takes jobs again"
    else:
        assert drain(store, "mine").startswith("node 'n0' gets no more jobs")
    assert store.transactions == 1
    assert reason_of(plain_store) == (None if drained else "mine")


def test_who_is_never_sure_is_told_so(store: Meddled) -> None:
    store.before = no_answer
    with pytest.raises(InfrastructureLost, match="node 'n0' changed 10 times meanwhile; try again"):
        drain(store, "mine")
