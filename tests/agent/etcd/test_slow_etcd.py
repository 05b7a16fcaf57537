"""An etcd that needs longer for an answer than an attempt has at first: requests succeed all the same."""

from __future__ import annotations

from bagua_agent.etcd.client import Put
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
