from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.base.errors import StoreUnavailable
from bagua_agent.etcd.client import KeyValue, Put, Store
from bagua_agent.etcd.connection import Connection
from bagua_agent.etcd.failures import CallFailed, Failure, Trouble
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.mirror import Change, Mirror, PrefixMirror, difference
from tests.agent.etcd.conftest import Recorder, Relay, Server, wait_until
from tests.lab.free_port import free_port

MakeStore = Callable[..., Store]
Batches = Recorder[tuple[Change, ...]]
Watch = Callable[..., tuple[PrefixMirror, Batches, Recorder[bool]]]


@pytest.fixture
def watch() -> Iterator[Watch]:
    mirrors = []

    def make(store: Store, **settings: float) -> tuple[PrefixMirror, Batches, Recorder[bool]]:
        changes: Batches = Recorder()
        connection: Recorder[bool] = Recorder()
        mirror = PrefixMirror(store, "/m/", changes, connection, **settings)
        mirrors.append(mirror)
        mirror.start()
        return mirror, changes, connection

    yield make
    for mirror in mirrors:
        mirror.stop()


def told(batches: list[tuple[Change, ...]]) -> list[tuple[str, bytes | None]]:
    return [(c.key, c.value) for batch in batches for c in batch]


def ends_with(*last: tuple[str, bytes | None]) -> Callable[[list[tuple[Change, ...]]], bool]:
    return lambda batches: told(batches)[-len(last) :] == list(last)


def compact(store: Store) -> None:
    """Forgets everything before the present revision."""
    revision = store.status().revision
    connection = Connection(store.config.endpoints[0], store.config)
    connection.call(lambda client: client.compact(revision, physical=True), 5)
    connection.close()


def test_tells_what_is_there_and_then_what_changes(
    server: Server, make_store: MakeStore, watch: Watch
) -> None:
    store = make_store(server.endpoint)
    first = store.put("/m/a", b"1")
    store.put("/other", b"")
    mirror, changes, connection = watch(store)
    assert changes.calls == [(Change("/m/a", b"1", first, first),)]
    connection.wait_for(lambda c: c == [True])
    both = store.transact([], [Put("/m/a", b"2"), Put("/m/b", b"3")]).revision
    gone = store.transact([], [], ["/m/a"]).revision
    changes.wait_for(lambda c: len(c) == 3)
    assert changes.calls[1:] == [
        (Change("/m/a", b"2", both, first), Change("/m/b", b"3", both, both)),  # one transaction, one batch
        (Change("/m/a", None, gone, first),),
    ]
    assert mirror.state() == {"/m/b": KeyValue("/m/b", b"3", both, both)}
    assert connection.calls == [True]


def test_an_empty_prefix_is_no_batch(unix_server: Server, make_store: MakeStore, watch: Watch) -> None:
    _, changes, connection = watch(make_store(unix_server.endpoint))
    connection.wait_for(lambda c: c == [True])
    assert changes.calls == []


def test_start_says_that_etcd_is_away(make_store: MakeStore) -> None:
    mirror = PrefixMirror(make_store(f"127.0.0.1:{free_port()}"), "/m/", lambda changes: None)
    with pytest.raises(StoreUnavailable):
        mirror.start(timeout_s=0.2)
    mirror.stop()


def test_survives_a_killed_etcd(server: Server, make_store: MakeStore, watch: Watch) -> None:
    store = make_store(server.endpoint)
    store.put("/m/leased", b"", store.lease_grant(60).lease_id)
    store.put("/m/a", b"1")
    _, changes, connection = watch(store)
    connection.wait_for(lambda c: c == [True])
    before = len(told(changes.calls))
    server.kill()
    connection.wait_for(lambda c: c == [True, False])
    server.restart()
    store.put("/m/a", b"2")
    store.put("/m/a", b"3")
    connection.wait_for(lambda c: c == [True, False, True])
    store.delete("/m/a")
    changes.wait_for(ends_with(("/m/a", None)))
    news = told(changes.calls)[before:]
    assert news == [("/m/a", b"2"), ("/m/a", b"3"), ("/m/a", None)]


def test_a_cut_misses_and_repeats_nothing(
    tcp_server: Server, make_store: MakeStore, make_relay: Callable[[str], Relay], watch: Watch
) -> None:
    direct = make_store(tcp_server.endpoint)
    direct.put("/m/leased", b"", direct.lease_grant(60).lease_id)
    relay = make_relay(tcp_server.endpoint)
    _, changes, connection = watch(make_store(relay.endpoint))
    for i in range(200):
        direct.put("/m/n", str(i).encode())
        if i % 50 == 25:
            connection.wait_for(lambda c: bool(c) and c[-1])  # up again since the last cut
            relay.cut()
            cuts = 1 + i // 50
            connection.wait_for(lambda c, cuts=cuts: c.count(False) == cuts)  # type: ignore[misc]
    changes.wait_for(ends_with(("/m/n", b"199")))
    assert told(changes.calls)[1:] == [("/m/n", str(i).encode()) for i in range(200)]


def test_a_compaction_while_away_leaves_the_difference(
    tcp_server: Server, make_store: MakeStore, make_relay: Callable[[str], Relay], watch: Watch
) -> None:
    direct = make_store(tcp_server.endpoint)
    direct.put("/m/leased", b"", direct.lease_grant(60).lease_id)
    for key in ("/m/same", "/m/changed", "/m/removed", "/m/remade"):
        direct.put(key, b"1")
    away, back = make_relay(tcp_server.endpoint), make_relay(tcp_server.endpoint)
    mirror, changes, connection = watch(make_store(away.endpoint, back.endpoint), silence_s=0.2)
    connection.wait_for(lambda c: c == [True])
    seen = len(changes.calls)
    away.freeze()
    direct.put("/m/changed", b"2")
    direct.put("/m/changed", b"3")
    direct.delete("/m/removed")
    direct.delete("/m/remade")
    direct.put("/m/remade", b"1")
    compact(direct)
    connection.wait_for(lambda c: c == [True, False, True])
    direct.put("/m/after", b"")
    changes.wait_for(ends_with(("/m/after", b"")))
    assert told(changes.calls[seen:]) == [
        ("/m/removed", None),
        ("/m/changed", b"3"),
        ("/m/remade", b"1"),
        ("/m/after", b""),
    ]
    assert mirror.state() == {kv.key: kv for kv in direct.get_prefix("/m/")[0]}


@pytest.mark.parametrize("grown", [False, True])
def test_an_etcd_that_lost_its_data_is_noticed(
    unix_server: Server, make_store: MakeStore, watch: Watch, grown: bool
) -> None:
    """Also if the new store has as many revisions as the old one had."""
    store = make_store(unix_server.endpoint)
    store.put("/m/leased", b"", store.lease_grant(60).lease_id)
    for key in ("/m/a", "/m/b", "/m/c"):
        store.put(key, b"1")
    mirror, changes, connection = watch(store)
    connection.wait_for(lambda c: c == [True])
    seen = len(changes.calls)
    unix_server.kill()
    unix_server.restart(lose_data=True)
    if grown:
        for i in range(20):
            store.put("/elsewhere", str(i).encode())
    store.put("/m/c", b"2")
    store.put("/m/d", b"2")
    changes.wait_for(ends_with(("/m/d", b"2")))
    news = told(changes.calls[seen:])
    assert {n for n in news if n[1] is None} >= {("/m/a", None), ("/m/b", None), ("/m/leased", None)}
    assert ("/m/c", b"2") in news
    assert len(news) == len(set(news)), "told twice"
    assert mirror.state() == {kv.key: kv for kv in store.get_prefix("/m/")[0]}


def test_a_reading_that_takes_longer_than_an_attempt_succeeds_all_the_same(
    unix_server: Server, make_store: MakeStore, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where many mirrors read all they follow at once, behind a restart of etcd."""
    store = make_store(unix_server.endpoint)
    store.put("/m/a", b"1")
    _, changes, connection = watch(store)
    connection.wait_for(lambda c: c == [True])
    needed_s, real = 2.5 * store.config.attempt_timeout_s, Connection.call
    refused: list[float] = []

    def slow(self: Connection, operation: Callable[..., Any], timeout_s: float, *more: Any) -> Any:
        if threading.current_thread().name == "store-mirror" and timeout_s < needed_s:
            refused.append(timeout_s)
            raise CallFailed(Failure(Trouble.MAYBE_DONE, "no answer", is_timeout=True))
        return real(self, operation, timeout_s, *more)

    monkeypatch.setattr(Connection, "call", slow)
    unix_server.kill()
    unix_server.restart()
    monkeypatch.setattr("bagua_agent.etcd.mirror._LONGEST_BACKOFF_S", 0.02)
    connection.wait_for(lambda c: c == [True, False, True])
    assert refused, "each reading had time enough"
    store.put("/m/b", b"2")
    changes.wait_for(ends_with(("/m/b", b"2")))


def test_an_etcd_that_was_set_back_is_noticed(
    tcp_server: Server, make_store: MakeStore, watch: Watch
) -> None:
    """Also if it has more revisions than before, and a leased key that was in the backup is the newest one of all."""
    store = make_store(tcp_server.endpoint)
    store.put("/m/kept", b"1")
    store.put("/m/leased", b"", store.lease_grant(600).lease_id)
    tcp_server.kill()
    tcp_server.back_up()
    tcp_server.restart()
    mirror, changes, connection = watch(store)
    connection.wait_for(lambda c: c == [True])
    store.put("/m/a", b"1")
    store.delete("/m/kept")
    changes.wait_for(ends_with(("/m/a", b"1"), ("/m/kept", None)))
    seen = len(changes.calls)
    tcp_server.kill()
    elsewhere = f"127.0.0.1:{free_port()}"  # where the mirror does not look
    tcp_server.restart(set_back=True, listen=elsewhere)
    new_history = make_store(elsewhere)
    for key in ("/m/b", "/m/c", "/m/d", "/m/e"):
        revision = new_history.put(key, b"2")
    assert revision > mirror.revision
    tcp_server.kill()
    tcp_server.restart()
    changes.wait_for(lambda c: len(told(c[seen:])) >= 6)
    news = told(changes.calls[seen:])
    assert sorted(news, key=str) == [
        ("/m/a", None),
        ("/m/b", b"2"),
        ("/m/c", b"2"),
        ("/m/d", b"2"),
        ("/m/e", b"2"),
        ("/m/kept", b"1"),
    ]
    assert mirror.state() == {kv.key: kv for kv in store.get_prefix("/m/")[0]}


def test_a_frozen_endpoint_is_left(
    tcp_server: Server, make_store: MakeStore, make_relay: Callable[[str], Relay], watch: Watch
) -> None:
    direct = make_store(tcp_server.endpoint)
    frozen, fine = make_relay(tcp_server.endpoint), make_relay(tcp_server.endpoint)
    _, changes, connection = watch(make_store(frozen.endpoint, fine.endpoint), silence_s=0.2)
    connection.wait_for(lambda c: c == [True])
    frozen.freeze()
    direct.put("/m/a", b"1")
    changes.wait_for(ends_with(("/m/a", b"1")), timeout_s=3)
    assert connection.wait_for(lambda c: len(c) == 3) == [True, False, True]
    assert told(changes.calls) == [("/m/a", b"1")]


def test_a_frozen_server_is_left(
    unix_server: Server, tcp_server: Server, make_store: MakeStore, watch: Watch
) -> None:
    make_store(tcp_server.endpoint).put("/m/second", b"")
    _, changes, connection = watch(make_store(unix_server.endpoint, tcp_server.endpoint), silence_s=0.2)
    connection.wait_for(lambda c: c == [True])
    unix_server.freeze()
    changes.wait_for(ends_with(("/m/second", b"")), timeout_s=3)


def test_a_quiet_watch_stays_up(unix_server: Server, make_store: MakeStore, watch: Watch) -> None:
    """A sign of life is asked for many times over here, and always given."""
    _, changes, connection = watch(make_store(unix_server.endpoint), silence_s=0.5)
    connection.wait_for(lambda c: c == [True])
    assert not threading.Event().wait(2.5)  # the quiet itself is what is tested
    assert connection.calls == [True]
    make_store(unix_server.endpoint).put("/m/a", b"")
    changes.wait_for(ends_with(("/m/a", b"")))


def test_a_slow_or_raising_callback_does_not_end_the_watch(
    unix_server: Server, make_store: MakeStore
) -> None:
    store = make_store(unix_server.endpoint)
    seen: Recorder[str] = Recorder()
    connection: Recorder[bool] = Recorder()
    release = threading.Event()

    def on_changes(changes: tuple[Change, ...]) -> None:
        seen(changes[0].key)
        if changes[0].key == "/m/slow":
            release.wait(5)
        if changes[0].key == "/m/raise":
            raise RuntimeError("as the test wants it")

    mirror = PrefixMirror(store, "/m/", on_changes, connection, silence_s=0.1)
    mirror.start()
    try:
        connection.wait_for(lambda c: c == [True])
        for key in ("/m/slow", "/m/raise", "/m/last"):
            store.put(key, b"")
        seen.wait_for(lambda s: s == ["/m/slow"])
        assert not threading.Event().wait(0.4)  # longer than two silences
        release.set()
        seen.wait_for(lambda s: s == ["/m/slow", "/m/raise", "/m/last"])
        assert connection.calls == [True]
    finally:
        mirror.stop()


@pytest.mark.parametrize("state", ["up", "frozen", "dead"])
def test_stop_ends_the_thread(unix_server: Server, make_store: MakeStore, watch: Watch, state: str) -> None:
    mirror, _, connection = watch(make_store(unix_server.endpoint))
    connection.wait_for(lambda c: c == [True])
    if state == "frozen":
        unix_server.freeze()
    if state == "dead":
        unix_server.kill()
        connection.wait_for(lambda c: c == [True, False])
    mirror.stop(timeout_s=1.0)
    assert not any(t.name == "store-mirror" for t in threading.enumerate())
    wait_until(lambda: not any("_consume_request" in t.name for t in threading.enumerate()), 2)


keys = st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 3), st.integers(4, 9)))


@given(keys, keys)
def test_a_difference_leads_from_old_to_new(
    old: dict[str, tuple[int, int]], new: dict[str, tuple[int, int]]
) -> None:
    def state(source: dict[str, tuple[int, int]]) -> dict[str, KeyValue]:
        return {k: KeyValue(k, str(mod).encode(), create, mod) for k, (create, mod) in source.items()}

    reached = {k: (kv.create_revision, kv.mod_revision) for k, kv in state(old).items()}
    for change in difference(state(old), state(new), 10):
        if change.value is None:
            del reached[change.key]
        else:
            assert reached.get(change.key) != (change.create_revision, change.mod_revision)
            reached[change.key] = (change.create_revision, change.mod_revision)
    assert reached == new


def of_ranges(store: Store, ranges: list[KeyRange]) -> tuple[Mirror, Batches]:
    changes: Batches = Recorder()
    return Mirror(store, ranges, changes), changes


def test_several_ranges_are_told_and_nothing_beside_them(server: Server, make_store: MakeStore) -> None:
    store = make_store(server.endpoint)
    store.put("/m/a/1", b"1")
    store.put("/m/b/1", b"no")
    store.put("/m/c", b"2")
    mirror, changes = of_ranges(store, [KeyRange.of_prefix("/m/a/"), KeyRange.of_key("/m/c")])
    mirror.start()
    try:
        # one transaction in both ranges, and in neither
        store.transact(
            puts=[Put("/m/a/2", b"3"), Put("/m/b/2", b"no"), Put("/m/c", b"4"), Put("/m/c0", b"no")]
        )
        wait_until(lambda: len(told(changes.calls)) == 4)
        assert set(told(changes.calls)) == {
            ("/m/a/1", b"1"),
            ("/m/c", b"2"),
            ("/m/a/2", b"3"),
            ("/m/c", b"4"),
        }
        assert set(mirror.state()) == {"/m/a/1", "/m/a/2", "/m/c"}
        assert mirror.value("/m/c") == b"4" and mirror.value("/m/b/1") is None
    finally:
        mirror.stop()


def test_following_more_tells_what_stands_there_as_one_batch(server: Server, make_store: MakeStore) -> None:
    store = make_store(server.endpoint)
    for i in range(3):
        store.put(f"/m/b/{i}", b"x")
    store.put("/m/a", b"1")
    mirror, changes = of_ranges(store, [KeyRange.of_key("/m/a")])
    mirror.start()
    followed = threading.Event()
    try:
        mirror.follow([KeyRange.of_prefix("/m/")], followed.set)
        assert followed.wait(10.0)
        assert [len(batch) for batch in changes.calls] == [1, 3]
        store.put("/m/b/9", b"y")
        wait_until(lambda: told(changes.calls)[-1] == ("/m/b/9", b"y"))
        followed.clear()
        mirror.follow([KeyRange.of_key("/m/a")], followed.set)
        assert followed.wait(10.0)
        assert sorted(told(changes.calls)[-4:]) == [(f"/m/b/{i}", None) for i in (0, 1, 2, 9)]
        store.put("/m/b/9", b"unseen")
        store.put("/m/a", b"2")
        wait_until(lambda: told(changes.calls)[-1] == ("/m/a", b"2"))
        assert ("/m/b/9", b"unseen") not in told(changes.calls)
    finally:
        mirror.stop()


def test_what_is_to_be_followed_may_change_while_the_store_is_away(
    server: Server, make_store: MakeStore
) -> None:
    store = make_store(server.endpoint)
    store.put("/m/a", b"1")
    store.put("/m/b", b"2")
    mirror, changes = of_ranges(store, [KeyRange.of_key("/m/a")])
    mirror.start()
    followed = threading.Event()
    try:
        server.freeze()
        mirror.follow([KeyRange.of_prefix("/m/")], followed.set)
        assert not followed.is_set()
        server.thaw()
        assert followed.wait(20.0)
        assert told(changes.calls) == [("/m/a", b"1"), ("/m/b", b"2")]
    finally:
        mirror.stop()


def test_a_raising_end_of_a_change_of_ranges_does_not_end_the_watch(
    server: Server, make_store: MakeStore
) -> None:
    store = make_store(server.endpoint)
    mirror, changes = of_ranges(store, [KeyRange.of_key("/m/a")])
    mirror.start()
    asked = threading.Event()

    def on_followed() -> None:
        asked.set()
        raise RuntimeError("as the test wants it")

    try:
        mirror.follow([KeyRange.of_prefix("/m/")], on_followed)
        assert asked.wait(10.0)
        store.put("/m/b", b"2")
        changes.wait_for(lambda calls: told(calls) == [("/m/b", b"2")])
    finally:
        mirror.stop()
