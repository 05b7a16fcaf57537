"""A node whose key is gone counts as lost and gets no job, so its daemon puts the key back after any removal."""

from __future__ import annotations

from pathlib import Path

from bagua_agent.cluster.cluster_records import read_node
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.agent.service.daemon_here import NODE, running_daemon
from tests.lab.wait import eventually

DEADLINE_S = 20.0
KEY = cluster_keys.node(NODE)


def test_a_key_that_is_removed_under_a_living_lease_is_put_back(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    with running_daemon(plain_etcd, plain_store, tmp_path):
        before = eventually(lambda: plain_store.get(KEY), DEADLINE_S, "the daemon's key")
        assert plain_store.delete(KEY)
        after = eventually(lambda: plain_store.get(KEY), DEADLINE_S, "it is put back")
        assert after.create_revision > before.create_revision, "it was gone"
        assert after.lease_id == before.lease_id
        assert read_node(after.value, NODE).node_name == NODE
