"""A node whose record can't be read counts as gone: the record need not be its daemon's, nor end with its lease."""

from __future__ import annotations

import pytest

from bagua_agent.cluster_state.cluster_picture import ClusterPicture
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.mirror import Change
from tests.agent.cluster_state.test_odd_records import node

KEY = cluster_keys.node("n0")


@pytest.mark.parametrize("odd", [b"\xff\xff", node("n1")], ids=["no record", "another node's"])
def test_a_node_with_an_unreadable_record_is_missed_until_its_daemon_writes_its_own(odd: bytes) -> None:
    said: list[str] = []
    picture = ClusterPicture(0.0, said.append)
    picture.take([Change(KEY, node("n0", slots=2), 5, 5)], 1.0)
    assert picture.view().nodes["n0"].present

    assert picture.take([Change(KEY, odd, 6, 5)], 2.0), "decisions follow from it"
    missed = picture.view().nodes["n0"]
    assert (missed.present, missed.absent_since_s, missed.slots) == (False, 2.0, 2)
    picture.take([Change(KEY, odd, 7, 5)], 3.0)
    assert picture.view().nodes["n0"].absent_since_s == 2.0
    assert len(said) == 1 and said[0].startswith(f"{KEY}: ")

    picture.take([Change(KEY, node("n0", slots=3), 8, 5)], 4.0)
    found = picture.view().nodes["n0"]
    assert (found.present, found.slots) == (True, 3)
