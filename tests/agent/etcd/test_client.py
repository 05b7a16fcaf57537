from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from bagua_agent.base.errors import InternalError, LeaseLost, OutcomeUnknown, StoreUnavailable, UserError
from bagua_agent.etcd.client import (
    KeyValue,
    Put,
    Store,
    absent,
    create_revision_is,
    lease_is,
    mod_revision_is,
    value_is,
)
from bagua_agent.etcd.key_range import KeyRange
from tests.agent.etcd.conftest import Relay, Server, wait_until
from tests.lab.free_port import free_port

MakeStore = Callable[..., Store]


def test_keys(server: Server, make_store: MakeStore) -> None:
    store = make_store(server.endpoint)
    store.connect(5)
    assert store.get("/a") is None
    first = store.put("/a", b"1")
    second = store.put("/a", b"\xff\x00")
    assert store.get("/a") == KeyValue("/a", b"\xff\x00", first, second, version=2)
    store.put("/ab", b"")
    store.put("/b", b"")
    found, revision = store.get_prefix("/a")
    assert [kv.key for kv in found] == ["/a", "/ab"]
    assert revision == second + 2
    assert store.delete("/a") and not store.delete("/a")
    assert store.delete_prefix("/") == 2
    assert store.get_prefix("/")[0] == []


def test_a_transaction_removes_whole_ranges(unix_server: Server, make_store: MakeStore) -> None:
    """However many keys lie in them; none of a range that begins alike."""
    store = make_store(unix_server.endpoint)
    for n in range(300):
        store.put(f"/a/{n}", b"")
    store.put("/ab", b"")
    store.put("/c", b"")
    refused = store.transact([absent("/c")], delete_ranges=[KeyRange.of_prefix("/a/")])
    assert not refused.succeeded and len(store.get_prefix("/a/")[0]) == 300
    assert store.transact([], [Put("/d", b"")], ["/c"], delete_ranges=[KeyRange.of_prefix("/a/")]).succeeded
    assert [kv.key for kv in store.get_prefix("/")[0]] == ["/ab", "/d"]


def test_transactions_are_fenced(unix_server: Server, make_store: MakeStore) -> None:
    store = make_store(unix_server.endpoint)
    won = store.transact([absent("/leader")], [Put("/leader", b"me")])
    assert won.succeeded
    assert not store.transact([absent("/leader")], [Put("/leader", b"you")]).succeeded

    fence = create_revision_is("/leader", won.revision)
    wrote = store.transact([fence, mod_revision_is("/generation", 0)], [Put("/generation", b"1")])
    assert wrote.succeeded
    assert not store.transact(
        [fence, mod_revision_is("/generation", 0)], [Put("/generation", b"x")]
    ).succeeded

    store.delete("/leader")
    store.put("/leader", b"you")  # another leader: same key, another create revision
    stale = store.transact(
        [fence, mod_revision_is("/generation", wrote.revision)], [Put("/generation", b"2")]
    )
    assert not stale.succeeded
    generation = store.get("/generation")
    assert generation is not None and generation.value == b"1"
    assert store.transact([value_is("/leader", b"you")], [], ["/leader", "/generation"]).succeeded
    assert store.get_prefix("/")[0] == []


def test_a_transaction_that_is_too_big_is_our_bug(unix_server: Server, make_store: MakeStore) -> None:
    with pytest.raises(InternalError, match="129"):
        make_store(unix_server.endpoint).transact([], [Put(f"/{i}", b"") for i in range(129)])


def test_leases(unix_server: Server, make_store: MakeStore) -> None:
    store = make_store(unix_server.endpoint)
    lease = store.lease_grant(1)
    store.put("/k", b"", lease.lease_id)
    assert store.lease_keys(lease.lease_id) == {"/k"}
    assert store.lease_keepalive_once(lease.lease_id).ttl_s == lease.ttl_s
    assert store.transact([lease_is("/k", lease.lease_id)]).succeeded
    wait_until(lambda: store.get("/k") is None)
    assert store.lease_keepalive_once(lease.lease_id).ttl_s == 0
    with pytest.raises(LeaseLost):
        store.lease_keys(lease.lease_id)
    with pytest.raises(LeaseLost):
        store.put("/k", b"", lease.lease_id)
    with pytest.raises(LeaseLost):
        store.transact([], [Put("/k", b"", lease.lease_id)])
    store.lease_revoke(lease.lease_id)  # gone is gone


def test_status(server: Server, make_store: MakeStore) -> None:
    status = make_store(server.endpoint).status()
    assert status.endpoint == server.endpoint
    assert status.version.startswith("3.")
    assert status.has_leader and status.revision >= 1


def test_connect_names_endpoints_and_reasons(make_store: MakeStore) -> None:
    refusing = f"127.0.0.1:{free_port()}"
    store = make_store(refusing, "unix:/nowhere/client:1")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        store.connect(0.4)
    assert time.monotonic() - began < 1.5
    said = str(caught.value)
    assert f"{refusing}: " in said and "refused" in said and "unix:/nowhere/client:1: " in said


def test_connect_waits_for_an_etcd_that_is_starting(unix_server: Server, make_store: MakeStore) -> None:
    unix_server.kill()
    store = make_store(unix_server.endpoint)
    with ThreadPoolExecutor(1) as pool:
        connected = pool.submit(store.connect, 10)
        unix_server.restart()  # here: etcd dies with the thread that starts it
        connected.result(timeout=10)


def test_something_else_listening_is_said(make_store: MakeStore) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with pytest.raises((StoreUnavailable, UserError), match=str(web.server_port)):
                make_store(f"127.0.0.1:{web.server_port}").connect(0.5)
        finally:
            web.shutdown()
            thread.join(5)


def test_an_endpoint_that_refuses_is_passed_over(server: Server, make_store: MakeStore) -> None:
    store = make_store(f"127.0.0.1:{free_port()}", server.endpoint)
    began = time.monotonic()
    store.put("/a", b"1")
    # never sent to the first, so even a transaction may go on
    other = make_store(f"127.0.0.1:{free_port()}", server.endpoint)
    assert other.transact([absent("/b")], [Put("/b", b"2")]).succeeded
    assert time.monotonic() - began < 1


def test_a_frozen_endpoint_costs_one_attempt(
    unix_server: Server, tcp_server: Server, make_store: MakeStore
) -> None:
    store = make_store(unix_server.endpoint, tcp_server.endpoint, attempt_timeout_s=0.3)
    store.put("/where", b"first")
    tcp_server_store = make_store(tcp_server.endpoint)
    tcp_server_store.put("/where", b"second")
    unix_server.freeze()
    began = time.monotonic()
    found = store.get("/where")
    assert found is not None and found.value == b"second"
    assert 0.25 < time.monotonic() - began < 1.5
    began = time.monotonic()
    store.put("/again", b"")
    assert time.monotonic() - began < 0.25  # it stays with the endpoint that answers


def test_the_outcome_of_a_transaction_without_answer_is_unknown(
    unix_server: Server, tcp_server: Server, make_store: MakeStore
) -> None:
    store = make_store(unix_server.endpoint, tcp_server.endpoint, attempt_timeout_s=0.3)
    store.connect(5)
    assert store.status().endpoint == unix_server.endpoint
    unix_server.freeze()
    with pytest.raises(OutcomeUnknown, match="/b"):
        store.transact([], [Put("/b", b"")])
    assert store.transact([], [Put("/b", b"")]).succeeded  # at the other


def test_goes_on_after_a_restart_with_the_same_data(server: Server, make_store: MakeStore) -> None:
    store = make_store(server.endpoint)
    store.put("/a", b"kept")
    server.kill()
    with pytest.raises(StoreUnavailable):
        store.get("/a", timeout_s=0.2)
    server.restart()
    found = store.get("/a")
    assert found is not None and found.value == b"kept"


def test_a_cut_of_all_connections_is_survived_by_many_threads(
    tcp_server: Server, make_store: MakeStore, make_relay: Callable[[str], Relay]
) -> None:
    relay = make_relay(tcp_server.endpoint)
    store = make_store(relay.endpoint)

    def write(thread: int) -> int:
        for i in range(100):
            store.put(f"/t/{thread}/{i}", b"")
            if thread == 0 and i % 20 == 10:
                relay.cut()
        return 100

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(write, range(4))) == 400
    assert len(store.get_prefix("/t/")[0]) == 400
    assert relay.accepted > 1  # the cuts happened


def test_close_ends_calls_in_flight(unix_server: Server, make_store: MakeStore) -> None:
    store = make_store(unix_server.endpoint, attempt_timeout_s=5.0)
    store.put("/a", b"")
    unix_server.freeze()
    with ThreadPoolExecutor(2) as pool:
        get = pool.submit(store.get, "/a")
        transaction = pool.submit(store.transact, [], [Put("/b", b"")])
        wait_until(lambda: sum(s.users for s in store._failover._connections.values()) == 2)
        store.close()
        for call in (get, transaction):
            with pytest.raises(StoreUnavailable, match="closed"):
                call.result(timeout=2)
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get("/a")
