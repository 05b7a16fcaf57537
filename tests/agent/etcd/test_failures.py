from __future__ import annotations

import grpc
import pytest

from bagua_agent.etcd.failures import Trouble, classify

C = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "details", "trouble"),
    [
        (
            C.UNAVAILABLE,
            "failed to connect to all addresses; last error: Connection refused",
            Trouble.NOT_SENT,
        ),
        (
            C.UNAVAILABLE,
            "errors resolving a:1: [field:hostname lookup error:address lookup failed for a:1: Domain name not found]",
            Trouble.NOT_SENT,
        ),
        (C.UNAVAILABLE, "Socket closed", Trouble.MAYBE_DONE),
        (C.UNAVAILABLE, "etcdserver: request timed out", Trouble.MAYBE_DONE),
        (C.UNAVAILABLE, "etcdserver: no leader", Trouble.NOT_SENT),
        (C.DEADLINE_EXCEEDED, "Deadline Exceeded", Trouble.MAYBE_DONE),
        (C.CANCELLED, "Channel closed!", Trouble.MAYBE_DONE),
        (C.INTERNAL, "", Trouble.MAYBE_DONE),
        (C.UNAUTHENTICATED, "etcdserver: invalid auth token", Trouble.TOKEN_REJECTED),
        (C.INVALID_ARGUMENT, "etcdserver: user name is empty", Trouble.TOKEN_REJECTED),
        (C.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", Trouble.RIGHTS_CHANGED),
        (C.UNKNOWN, "auth: revision in header is old", Trouble.RIGHTS_CHANGED),
        (
            C.INVALID_ARGUMENT,
            "etcdserver: authentication failed, invalid user ID or password",
            Trouble.LOGIN_REJECTED,
        ),
        (C.INVALID_ARGUMENT, "etcdserver: request is too large", Trouble.REFUSED),
        (C.PERMISSION_DENIED, "etcdserver: permission denied", Trouble.DENIED),
        (C.NOT_FOUND, "etcdserver: requested lease not found", Trouble.LEASE_GONE),
        (C.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", Trouble.FULL),
        (C.RESOURCE_EXHAUSTED, "etcdserver: too many requests", Trouble.BUSY),
        (C.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted", Trouble.HISTORY_GONE),
        (C.UNIMPLEMENTED, "unknown service etcdserverpb.KV", Trouble.NOT_ETCD),
    ],
)
def test_meaning(code: grpc.StatusCode, details: str, trouble: Trouble) -> None:
    failure = classify(code, details)
    assert failure.trouble is trouble
    assert failure.detail


@pytest.mark.parametrize(
    ("details", "detail"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: "
            "Failed to connect to remote host: Connection refused",
            "connection refused",
        ),
        ("DNS resolution failed for a:1: C-ares status is not ARES_SUCCESS", "its name can't be resolved"),
        (
            "errors resolving a:1: [field:hostname lookup error: Domain name not found]",
            "its name can't be resolved",
        ),
        ("etcdserver: no leader", "etcdserver: no leader"),
    ],
)
def test_the_detail_names_the_cause(details: str, detail: str) -> None:
    assert classify(C.UNAVAILABLE, details).detail == detail
