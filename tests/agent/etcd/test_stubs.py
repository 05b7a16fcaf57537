from __future__ import annotations

from bagua_contract import etcd_pb2


def test_stays_clear_of_etcds_own_names() -> None:
    """Another copy of etcd's messages may be loaded in the same process."""
    assert etcd_pb2.DESCRIPTOR.package == "bagua.etcd"
