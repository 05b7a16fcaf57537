"""An etcd that needs longer for an answer than an attempt has at first: requests succeed all the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bagua_agent.base.errors import OutcomeUnknown
from bagua_agent.etcd import failover
from bagua_agent.etcd.client import Put, Store, StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.failures import CallFailed, Failure, Trouble
from bagua_agent.etcd.leased_keys import LeaseGranted, StoreAway
from tests.agent.etcd.conftest import DEADLINE_S, Server
from tests.agent.etcd.kept_keys import Keep, MakeStore, kinds, read
from tests.agent.etcd.slow_relay import MakeSlowRelay, make_slow_relay
from tests.lab.wait import HANG_S

__all__ = ["make_slow_relay"]

ATTEMPT_S = 0.2
ANSWER_S = 0.5
PATIENT = {"attempt_timeout_s": ATTEMPT_S, "request_timeout_s": 2 * DEADLINE_S}


def test_each_request_succeeds(
    tcp_server: Server, make_store: MakeStore, make_slow_relay: MakeSlowRelay
) -> None:
    relay = make_slow_relay(tcp_server.endpoint, ANSWER_S)
    store = make_store(relay.endpoint, **PATIENT)
    store.put("/a", b"1")
    lease = store.lease_grant(30)
    # attempts last long enough by now, so that one is enough
    assert store.transact([], [Put("/b", b"2", lease.lease_id)]).succeeded


def test_a_connection_that_takes_longer_than_an_attempt_is_waited_for(
    tcp_server: Server, make_store: MakeStore, make_slow_relay: MakeSlowRelay
) -> None:
    relay = make_slow_relay(tcp_server.endpoint, ANSWER_S)
    make_store(relay.endpoint, **PATIENT).put("/a", b"1")
    assert relay.accepted == 1


def test_leased_keys_are_written(
    tcp_server: Server, make_store: MakeStore, make_slow_relay: MakeSlowRelay, keep: Keep
) -> None:
    relay = make_slow_relay(tcp_server.endpoint, ANSWER_S)
    keys, events = keep(make_store(relay.endpoint, **PATIENT), 30)
    keys.put("/a", b"1")
    assert keys.flush(HANG_S)
    assert read(make_store(tcp_server.endpoint), "/a").lease_id == keys.lease_id
    assert kinds(events.calls)[0] is LeaseGranted and StoreAway not in kinds(events.calls)


class SlowCommits:
    """Takes the place of a connection: reads and renewals are answered at once, and writes as `answers_writes` says.
    limits_s: of the attempts so far."""

    def __init__(self) -> None:
        self.answers_writes = False
        self.limits_s: list[float] = []
        self.endpoint = "etcd-1:2379"

    def call(self, attempt: object, limit_s: float, deadline_s: float) -> SimpleNamespace:
        self.limits_s.append(round(limit_s))
        is_write = "Store.transact" in repr(attempt)
        if is_write and not self.answers_writes:
            raise CallFailed(Failure(Trouble.MAYBE_DONE, "Deadline Exceeded", is_timeout=True))
        return SimpleNamespace(kvs=[], TTL=9, header=SimpleNamespace(revision=1))

    def close(self) -> None:
        pass


def test_quick_answers_to_reads_and_renewals_leave_slow_writes_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    etcd = SlowCommits()
    monkeypatch.setattr(failover, "Connection", lambda *arguments: etcd)
    endpoint = parse_endpoint("etcd-1:2379")
    store = Store(StoreConfig((endpoint,), attempt_timeout_s=100.0, request_timeout_s=1000.0))
    for _ in range(3):
        with pytest.raises(OutcomeUnknown):
            store.transact([], [Put("/a", b"1")])
        store.get("/a")
        store.lease_keepalive_once(1)
    assert etcd.limits_s == [100, 100, 100, 200, 100, 100, 400, 100, 100]
    etcd.answers_writes = True
    store.transact([], [Put("/a", b"1")])
    store.transact([], [Put("/a", b"1")])
    assert etcd.limits_s[-2:] == [800, 100], (
        "a write that is answered at once has shown that commits are quick"
    )
