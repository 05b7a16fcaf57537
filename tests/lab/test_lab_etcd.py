"""etcd on the lab's hosts is reached, killed and restarted as the lab says."""

from __future__ import annotations

import base64

import pytest

from tests.lab.fixtures import MakeLab
from tests.lab.namespaces import LabError
from tests.lab.network import Lab


def test_one_member_keeps_its_data_over_a_kill(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    cluster = lab.etcd(lab.hosts[0])
    assert cluster.endpoints == f"{lab.hosts[0].address}:2379"
    member = cluster.members[0]

    cluster.kill()
    assert not member.is_healthy()
    with pytest.raises(ConnectionRefusedError):
        lab.hosts[1].connect((lab.hosts[0].address, 2379), 2)
    cluster.restart()

    assert member.is_healthy()
    assert member.data.exists()
    lab.hosts[1].connect((lab.hosts[0].address, 2379), 2).close()


def test_three_members_outlive_one(lab: Lab) -> None:
    cluster = lab.etcd(*lab.hosts)
    cluster.members[0].kill()
    cluster.members[1].await_healthy()
    cluster.members[0].restart()
    assert all(member.is_healthy() for member in cluster.members)


def test_members_share_a_host_on_ports_of_their_own(make_lab: MakeLab) -> None:
    cluster = make_lab(1).etcd(*make_lab(1).hosts, members=1)
    assert len(cluster.endpoints.split(",")) == 1
    lab = make_lab(1)
    pair = lab.etcd(lab.hosts[0], members=2)
    assert [endpoint.rpartition(":")[2] for endpoint in pair.endpoints.split(",")] == ["2379", "2389"]
    with pytest.raises(LabError, match="one to three"):
        lab.etcd(lab.hosts[0], members=4)


def test_the_leading_member_is_killed_and_another_leads(lab: Lab) -> None:
    cluster = lab.etcd(*lab.hosts)
    first = cluster.leader
    assert len(cluster.followers) == 2
    first.kill()
    assert cluster.leader is not first
    first.restart()
    assert len(cluster.followers) == 2


def test_an_empty_member_takes_the_place_of_one_that_lost_its_disk(make_lab: MakeLab) -> None:
    lab = make_lab(1)
    cluster = lab.etcd(lab.hosts[0], members=3)
    victim = cluster.followers[0]
    victim.call("kv/put", key=base64.b64encode(b"k").decode(), value=base64.b64encode(b"v").decode())
    victim.wipe()
    assert all(member.is_healthy() for member in cluster.members)
    answer = victim.call("kv/range", key=base64.b64encode(b"k").decode())
    assert base64.b64decode(answer["kvs"][0]["value"]) == b"v"
    victim.restart()


def test_history_tells_every_write_and_removal(make_lab: MakeLab) -> None:
    cluster = make_lab(1).etcd(*make_lab(1).hosts)
    key = base64.b64encode(b"k").decode()
    assert cluster.history("k") == []
    for value in ("a", "b"):
        cluster.members[0].call("kv/put", key=key, value=base64.b64encode(value.encode()).decode())
    cluster.members[0].call("kv/deleterange", key=key)
    cluster.members[0].call("kv/put", key=key, value=base64.b64encode(b"c").decode())
    cluster.members[0].call("kv/deleterange", key=key)
    changes = cluster.history("k")
    assert [change.value for change in changes] == [b"a", b"b", None, b"c", None]
    assert sorted(change.revision for change in changes) == [change.revision for change in changes]
