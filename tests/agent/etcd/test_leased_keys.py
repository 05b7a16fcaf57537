"""Leased keys on real servers: they are there while their process lives, and come back after losses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from bagua_agent.base.errors import InternalError, UserError
from bagua_agent.etcd.client import KeepAlive, KeyValue, Store
from bagua_agent.etcd.leased_keys import (
    KeepingEnded,
    LeasedKeys,
    LeaseEvent,
    LeaseGranted,
    LeaseLapsed,
    StoreAway,
    StoreBack,
)
from bagua_agent.etcd.mirror import Change, PrefixMirror
from tests.agent.etcd.conftest import DEADLINE_S, Recorder, Relay, Server, wait_until
from tests.agent.etcd.kept_keys import Keep, MakeStore, kinds, read, values
from tests.lab.wait import HANG_S


def test_keys_stand_while_the_process_lives(server: Server, make_store: MakeStore, keep: Keep) -> None:
    store = make_store(server.endpoint)
    keys, events = keep(store, 1)
    keys.put("/a", b"1")
    keys.put("/b", b"2")
    assert keys.flush(5)
    first = read(store, "/a")
    assert first.lease_id == keys.lease_id != 0
    assert not threading.Event().wait(1.6)  # past its TTL: only renewals keep it
    assert values(store) == {"/a": b"1", "/b": b"2"}
    assert read(store, "/a") == first, "written again without need"
    keys.close()
    assert values(store) == {}
    assert kinds(events.calls) == [LeaseGranted]


def test_keys_whose_renewals_are_held_go_and_come_back(unix_server: Server, make_store: MakeStore) -> None:
    store, events = make_store(unix_server.endpoint), Recorder[LeaseEvent]()
    held = threading.Event()
    keys = LeasedKeys(store, 1, events, held.is_set)
    try:
        keys.put("/a", b"1")
        assert keys.flush(HANG_S)
        held.set()
        wait_until(lambda: values(store) == {}, HANG_S)
        held.clear()
        wait_until(lambda: values(store) == {"/a": b"1"}, HANG_S)
        assert LeaseLapsed in kinds(events.calls)
    finally:
        keys.close()


def test_a_thread_that_ends_for_good_says_so(
    unix_server: Server, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(keys: LeasedKeys) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(LeasedKeys, "_work", end)
    events = Recorder[LeaseEvent]()
    keys = LeasedKeys(make_store(unix_server.endpoint), 30, events)
    events.wait_for(bool, HANG_S)
    keys.close()
    assert kinds(events.calls) == [KeepingEnded]


def test_a_put_is_written_at_once(unix_server: Server, make_store: MakeStore, keep: Keep) -> None:
    store = make_store(unix_server.endpoint)
    keys, _ = keep(store, 30)
    keys.put("/warm", b"")
    assert keys.flush(5)
    took = []
    for i in range(10):
        began = time.monotonic()
        keys.put("/a", str(i).encode())
        assert keys.flush(5)
        took.append(time.monotonic() - began)
    assert sorted(took)[5] < 0.05


def test_the_last_word_counts(unix_server: Server, make_store: MakeStore, keep: Keep) -> None:
    store = make_store(unix_server.endpoint)
    keys, _ = keep(store)
    for i in range(300):
        keys.put(f"/k/{i}", b"x")
        keys.put(f"/k/{i}", b"y")
        if i % 2:
            keys.remove(f"/k/{i}")
    assert keys.flush(10)
    assert values(store) == {f"/k/{i}": b"y" for i in range(0, 300, 2)}


def test_an_unchanged_put_writes_nothing(unix_server: Server, make_store: MakeStore, keep: Keep) -> None:
    store = make_store(unix_server.endpoint)
    keys, _ = keep(store)
    keys.put("/a", b"1")
    assert keys.flush(5)
    before = read(store, "/a")
    keys.put("/a", b"1")
    assert keys.flush(5)
    assert read(store, "/a") == before
    keys.put("/a", b"2")
    assert keys.flush(5)
    assert read(store, "/a").create_revision == before.create_revision


def test_takes_over_a_key_that_is_already_there(
    unix_server: Server, make_store: MakeStore, keep: Keep
) -> None:
    store = make_store(unix_server.endpoint)
    store.put("/a", b"1")
    keys, _ = keep(store)
    keys.put("/a", b"1")
    assert keys.flush(5)
    assert read(store, "/a").lease_id == keys.lease_id


def test_what_another_owner_has_is_not_written_over_until_it_is_gone(
    unix_server: Server, make_store: MakeStore, keep: Keep
) -> None:
    store = make_store(unix_server.endpoint)
    keys, _ = keep(store)

    def is_anothers(found: KeyValue) -> bool:
        return found.value.startswith(b"another's")

    keys.put("/a", b"ours 1", is_anothers)
    assert keys.flush(DEADLINE_S)
    store.put("/a", b"another's")
    keys.put("/a", b"ours 2", is_anothers)
    keys.put("/b", b"")
    wait_until(lambda: "/b" in values(store))
    for number in range(3):  # a look at the key, and a write behind it
        keys.recheck()
        keys.put("/b", str(number).encode())
        wait_until(lambda last=number: values(store)["/b"] == str(last).encode())  # type: ignore[misc]
    assert values(store)["/a"] == b"another's"
    assert not keys.flush(0), "counts as written"
    store.delete("/a")
    keys.recheck()
    assert keys.flush(DEADLINE_S)
    assert values(store)["/a"] == b"ours 2"


def test_remove_leaves_keys_of_others(unix_server: Server, make_store: MakeStore, keep: Keep) -> None:
    store = make_store(unix_server.endpoint)
    store.put("/theirs", b"")
    keys, _ = keep(store)
    keys.remove("/theirs")
    assert keys.flush(5)
    assert "/theirs" in values(store)


def test_a_lost_lease_is_replaced_and_its_keys_put_again(
    unix_server: Server, make_store: MakeStore, keep: Keep
) -> None:
    store = make_store(unix_server.endpoint)
    keys, events = keep(store, 1)
    keys.put("/a", b"1")
    assert keys.put_if_absent("/won", b"me") is not None
    assert keys.flush(5)
    old = keys.lease_id
    store.lease_revoke(old)
    events.wait_for(lambda e: kinds(e) == [LeaseGranted, LeaseLapsed, LeaseGranted])
    assert keys.flush(5)
    assert values(store) == {"/a": b"1"}  # what was won is lost: another may have won it since
    assert read(store, "/a").lease_id == keys.lease_id != old


def test_a_short_outage_keeps_lease_and_keys(server: Server, make_store: MakeStore, keep: Keep) -> None:
    store = make_store(server.endpoint)
    keys, events = keep(store, 2)
    keys.put("/a", b"1")
    assert keys.flush(5)
    before = read(store, "/a")
    server.kill()
    keys.put("/b", b"2")
    events.wait_for(lambda e: kinds(e) == [LeaseGranted, StoreAway])
    server.restart()
    events.wait_for(lambda e: kinds(e) == [LeaseGranted, StoreAway, StoreBack])
    assert keys.flush(5)
    assert values(store) == {"/a": b"1", "/b": b"2"}
    assert read(store, "/a") == before
    assert keys.lease_id == before.lease_id


def test_keys_come_back_after_a_loss_of_data(unix_server: Server, make_store: MakeStore, keep: Keep) -> None:
    store = make_store(unix_server.endpoint)
    keys, events = keep(store, 1)
    keys.put("/a", b"1")
    assert keys.flush(5)
    unix_server.kill()
    unix_server.restart(lose_data=True)
    events.wait_for(lambda e: LeaseLapsed in kinds(e))
    assert keys.flush(5)
    wait_until(lambda: values(store) == {"/a": b"1"})


def test_a_key_of_a_backup_has_its_present_value_again(
    tcp_server: Server, make_store: MakeStore, keep: Keep
) -> None:
    """The lease is in the backup too, so no key is missing on it."""
    store = make_store(tcp_server.endpoint)
    keys, _ = keep(store, 6)
    keys.put("/k/a", b"1")
    assert keys.flush(DEADLINE_S)
    tcp_server.kill()
    tcp_server.back_up()
    tcp_server.restart()
    keys.put("/k/a", b"2")
    assert keys.flush(DEADLINE_S)
    tcp_server.kill()
    tcp_server.restart(set_back=True)
    wait_until(lambda: values(store) == {"/k/a": b"2"})
    assert read(store, "/k/a").lease_id == keys.lease_id


def test_a_key_that_vanished_is_put_again_on_request(
    unix_server: Server, make_store: MakeStore, keep: Keep
) -> None:
    store = make_store(unix_server.endpoint)
    keys, events = keep(store, 30)
    keys.put("/a", b"1")
    keys.put("/b", b"2")
    assert keys.flush(5)
    kept = read(store, "/b")
    store.delete("/a")
    keys.recheck()
    wait_until(lambda: values(store) == {"/a": b"1", "/b": b"2"})
    assert read(store, "/b") == kept
    assert kinds(events.calls) == [LeaseGranted]


def test_a_frozen_endpoint_does_not_cost_the_lease(
    tcp_server: Server, make_store: MakeStore, make_relay: Callable[[str], Relay], keep: Keep
) -> None:
    first, second = make_relay(tcp_server.endpoint), make_relay(tcp_server.endpoint)
    keys, events = keep(make_store(first.endpoint, second.endpoint), 2)
    keys.put("/a", b"1")
    assert keys.flush(5)
    first.freeze()
    keys.put("/b", b"2")
    assert keys.flush(5)
    keys.put("/c", b"3")
    assert keys.flush(5)
    assert LeaseLapsed not in kinds(events.calls)
    assert values(make_store(tcp_server.endpoint)) == {"/a": b"1", "/b": b"2", "/c": b"3"}
    assert second.accepted >= 1


def test_what_a_frozen_server_does_late_undoes_nothing(
    unix_server: Server, make_store: MakeStore, keep: Keep
) -> None:
    """The server receives a write, freezes before doing it, and is not asked again until the owner changed
    its mind. Whatever it does when it thaws, the last word counts."""
    store = make_store(unix_server.endpoint, attempt_timeout_s=0.2)
    keys, events = keep(store, 3)
    keys.put("/a", b"old")
    assert keys.flush(5)
    unix_server.freeze()
    keys.put("/a", b"late")
    keys.put("/b", b"late")
    events.wait_for(lambda e: StoreAway in kinds(e))
    keys.put("/a", b"new")
    keys.remove("/b")
    unix_server.thaw()
    events.wait_for(lambda e: StoreBack in kinds(e))
    assert keys.flush(5)
    assert values(store) == {"/a": b"new"}


@pytest.mark.parametrize("state", ["up", "frozen", "dead"])
def test_close_is_bounded(unix_server: Server, make_store: MakeStore, keep: Keep, state: str) -> None:
    keys, _ = keep(make_store(unix_server.endpoint), 2)
    keys.put("/a", b"")
    assert keys.flush(5)
    if state == "frozen":
        unix_server.freeze()
    if state == "dead":
        unix_server.kill()
    keys.put("/b", b"")
    began = time.monotonic()
    keys.close()
    assert time.monotonic() - began < 4
    with pytest.raises(InternalError):
        keys.put("/c", b"")


def test_without_revoke_the_keys_end_with_the_lease(
    unix_server: Server, make_store: MakeStore, keep: Keep
) -> None:
    store = make_store(unix_server.endpoint)
    keys, _ = keep(store, 1)
    keys.put("/a", b"")
    assert keys.flush(5)
    keys.close(revoke=False)
    assert values(store) == {"/a": b""}
    wait_until(lambda: values(store) == {}, 4)


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "leased-keys"}


class HangingStore(Store):
    """Once `hang` is set the next renewal does not end before `go_on` is set, whatever its time limit."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.config)
        self.hang, self.hangs, self.go_on = threading.Event(), threading.Event(), threading.Event()

    def lease_keepalive_once(self, lease_id: int, timeout_s: float | None = None) -> KeepAlive:
        if self.hang.is_set() and not self.hangs.is_set():
            self.hangs.set()
            assert self.go_on.wait(60)
        return super().lease_keepalive_once(lease_id, timeout_s)


def test_a_thread_that_does_not_come_back_from_etcd_is_reported_and_replaced(
    unix_server: Server, make_store: MakeStore, keep: Keep, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(unix_server.endpoint)
    hanging = HangingStore(store)
    keys, events = keep(hanging, 1)
    keys.put("/a", b"1")
    assert keys.flush(5)
    [stuck] = own_threads()
    hanging.hang.set()
    try:
        wait_until(lambda: values(store) == {})
        assert hanging.hangs.is_set()
        keys.recheck()
        wait_until(lambda: values(store) == {"/a": b"1"})
        lease_id = keys.lease_id
        said = [record.getMessage() for record in caplog.records]
        assert any("another thread" in line and "lease_keepalive_once" in line for line in said), said
    finally:
        hanging.go_on.set()
    stuck.join(DEADLINE_S)
    assert not stuck.is_alive(), "the replaced thread goes on"
    keys.put("/b", b"2")
    assert keys.flush(5)
    assert values(store) == {"/a": b"1", "/b": b"2"}
    assert keys.lease_id == lease_id, "the late end of the old request counted for the new lease"
    assert kinds(events.calls) == [LeaseGranted, LeaseLapsed, LeaseGranted]
    hanging.close()


def test_a_recheck_leaves_a_thread_that_works_alone(
    unix_server: Server, make_store: MakeStore, keep: Keep
) -> None:
    keys, _ = keep(make_store(unix_server.endpoint), 30)
    keys.put("/a", b"1")
    assert keys.flush(5)
    before = own_threads()
    keys.recheck()
    keys.put("/b", b"2")
    assert keys.flush(5)
    assert own_threads() == before


def test_a_raising_owner_does_not_cost_the_lease(unix_server: Server, make_store: MakeStore) -> None:
    def raising(event: LeaseEvent) -> None:
        raise RuntimeError("as the test wants it")

    keys = LeasedKeys(make_store(unix_server.endpoint), 3, raising)
    try:
        keys.put("/a", b"")
        assert keys.flush(5)
    finally:
        keys.close()


def test_a_lease_of_no_time_is_refused(make_store: MakeStore) -> None:
    with pytest.raises(UserError, match="0 s"):
        LeasedKeys(make_store("127.0.0.1:1"), 0)


def test_watcher_and_owner_together_through_a_loss_of_data(
    unix_server: Server, make_store: MakeStore, keep: Keep
) -> None:
    store = make_store(unix_server.endpoint)
    owners = [keep(store, 1)[0] for _ in range(3)]
    changes: Recorder[tuple[Change, ...]] = Recorder()
    mirror = PrefixMirror(store, "/m/", changes)
    mirror.start()
    try:
        for i, owner in enumerate(owners):
            owner.put(f"/m/{i}", b"")
        wanted = {f"/m/{i}" for i in range(3)}
        changes.wait_for(lambda c: mirror.state().keys() == wanted)
        old = mirror.state()
        unix_server.kill()
        unix_server.restart(lose_data=True)
        changes.wait_for(
            lambda c: (
                mirror.state().keys() == wanted
                and all(kv.lease_id != old[key].lease_id for key, kv in mirror.state().items())
            )
        )
    finally:
        mirror.stop()
