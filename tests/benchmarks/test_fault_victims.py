"""The choice of the host that a fault of the benchmark strikes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from benchmarks.fault_victims import NoLeaderError, leading_host, pick
from tests.lab.etcd import EtcdCluster, StoredValue
from tests.lab.network import Host

HOSTS = ("one", "two", "three")


@pytest.mark.parametrize(
    ("leader", "other"), [("one", "three"), ("two", "three"), ("three", "two"), (None, "three")]
)
def test_another_host_than_the_leaders_is_picked(leader: str | None, other: str) -> None:
    assert pick(HOSTS, leader, of_leader=False) == other


@pytest.mark.parametrize("leader", HOSTS)
def test_the_leaders_host_is_picked(leader: str) -> None:
    assert pick(HOSTS, leader, of_leader=True) == leader


@pytest.mark.parametrize("leader", [None, "four"])
def test_where_none_leads_none_is_picked_in_its_place(leader: str | None) -> None:
    with pytest.raises(NoLeaderError):
        pick(HOSTS, leader, of_leader=True)


@pytest.mark.parametrize(("address", "found"), [("10.0.0.2:71", 1), ("10.0.0.9:71", None), ("", None)])
def test_who_leads_is_what_the_leader_key_says_now(address: str, found: int | None) -> None:
    key = JobKeys("job").leader
    value = pb.Leader(agent_id="a", control_address=address).SerializeToString()
    standing = {key: StoredValue(value, 1)} if address else {}
    cluster = SimpleNamespace(standing=lambda prefix: standing if prefix == key else {})
    hosts = [cast(Host, SimpleNamespace(address=f"10.0.0.{n}")) for n in (1, 2)]
    leads = leading_host(cast(EtcdCluster, cluster), "job", hosts)
    assert leads is (None if found is None else hosts[found])
