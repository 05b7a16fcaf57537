from __future__ import annotations

import subprocess
import sys
import textwrap

from bagua_agent.etcd.stubs import etcd3
from bagua_contract import etcd_pb2
from tests.lab.wait import HANG_S


def test_etcd3_finds_everything_it_names() -> None:
    rpc = etcd3.etcdrpc
    assert rpc.RangeRequest is etcd_pb2.RangeRequest
    assert rpc.NOSPACE == 1
    for name in ("KVStub", "WatchStub", "LeaseStub", "ClusterStub", "MaintenanceStub", "AuthStub"):
        assert isinstance(getattr(rpc, name), type)


def test_stays_clear_of_etcds_own_names() -> None:
    assert etcd_pb2.DESCRIPTOR.package == "bagua.etcd"


def test_a_process_that_imported_etcd3_before_keeps_what_it_has() -> None:
    program = """
        import sys, types
        foreign = types.ModuleType("etcd3.etcdrpc")
        from bagua_contract import etcd_pb2
        for name in dir(etcd_pb2):
            setattr(foreign, name, getattr(etcd_pb2, name))
        sys.modules["etcd3.etcdrpc"] = foreign
        import etcd3
        from bagua_agent.etcd import stubs as etcd_stubs
        assert etcd_stubs.etcd3.etcdrpc is foreign
        assert sys.modules["etcd3.etcdrpc"] is foreign
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=HANG_S)
