"""Provides gRPC stubs of etcd's services, over generated messages that load under protobuf 5, 6 and 7.

etcd's published Python clients ship generated code that a current protobuf refuses to load. The messages carry a
package name of Bagua's, so another copy of them may be loaded in the same process; the wire format is etcd's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc

from bagua_contract import etcd_pb2 as pb


def _stub_class(service: str, methods: dict[str, str], kind: str = "unary_unary") -> type:
    """A stub of /etcdserverpb.<service>; methods maps each name to that of its messages, without Request."""

    def init(self: Any, channel: grpc.Channel) -> None:
        for name, message in methods.items():
            multicallable: Callable[..., Any] = getattr(channel, kind)
            call = multicallable(
                f"/etcdserverpb.{service}/{name}",
                request_serializer=getattr(pb, f"{message}Request").SerializeToString,
                response_deserializer=getattr(pb, f"{message}Response").FromString,
            )
            setattr(self, name, call)

    return type(f"{service}Stub", (), {"__init__": init, "__doc__": f"Client of etcdserverpb.{service}."})


def _same(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


def _auth_messages(names: Iterable[str]) -> dict[str, str]:
    """Messages of the Auth service are called Auth<method>, but for those that begin so."""
    return {name: name if name.startswith("Auth") else f"Auth{name}" for name in names}


KVStub = _stub_class("KV", {"Txn": "Txn", "Compact": "Compaction", **_same(("Range", "Put", "DeleteRange"))})
WatchStub = _stub_class("Watch", _same(("Watch",)), "stream_stream")
LeaseStub = _stub_class("Lease", _same(("LeaseGrant", "LeaseRevoke", "LeaseTimeToLive")))
KeepAliveStub = _stub_class("Lease", _same(("LeaseKeepAlive",)), "stream_stream")
ClusterStub = _stub_class("Cluster", _same(("MemberList",)))
MaintenanceStub = _stub_class("Maintenance", _same(("Alarm", "Status", "Defragment")))
AuthStub = _stub_class(
    "Auth",
    _auth_messages(
        (
            *("AuthStatus", "AuthEnable", "Authenticate"),
            *("UserAdd", "UserList", "UserGet", "UserDelete", "UserGrantRole", "UserRevokeRole"),
            *("RoleAdd", "RoleList", "RoleGet", "RoleGrantPermission", "RoleRevokePermission"),
        )
    ),
)
