"""A read of many keys: no request is for more than a page, and all pages show one revision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bagua_agent.base.errors import StoreUnavailable
from bagua_agent.etcd import paged_read
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.connection import Connection
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.mirror import Mirror
from tests.agent.etcd.conftest import Recorder, Server, wait_until

MakeStore = Callable[..., Store]
A, B = KeyRange.of_prefix("/m/a/"), KeyRange.of_prefix("/m/b/")
PAGE = 4


class Pages:
    """Counts the keys of each answer of KV that a connection gets, and calls `between` behind each that has more."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.between: Callable[[], object] = lambda: None

    def stub(self, real: Any) -> Any:
        return _Stub(self, real)


class _Stub:
    def __init__(self, pages: Pages, real: Any) -> None:
        self._pages, self._real = pages, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def Range(self, *args: Any, **more: Any) -> Any:
        answer = self._real.Range(*args, **more)
        self._seen([answer])
        return answer

    def Txn(self, *args: Any, **more: Any) -> Any:
        answer = self._real.Txn(*args, **more)
        self._seen([one.response_range for one in answer.responses])
        return answer

    def _seen(self, answers: list[Any]) -> None:
        self._pages.sizes.append(sum(len(one.kvs) for one in answers))
        if any(one.more for one in answers):
            self._pages.between()


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    seen, plain = Pages(), Connection.call

    def call(self: Connection, attempt: Callable[[Any], Any], *limits: Any) -> Any:
        def counted(client: Any) -> Any:
            if not isinstance(client.kvstub, _Stub):
                client.kvstub = seen.stub(client.kvstub)
            return attempt(client)

        return plain(self, counted, *limits)

    monkeypatch.setattr(Connection, "call", call)
    monkeypatch.setattr(paged_read, "PAGE_KEYS", PAGE)
    return seen


def filled(store: Store) -> dict[str, bytes]:
    keys = {f"/m/{range_}/{n}": b"%d" % n for range_ in "ab" for n in range(10)}
    for key, value in keys.items():
        store.put(key, value)
    store.put("/m/c", b"beside them")
    return keys


def test_all_pages_show_the_revision_of_the_first(
    unix_server: Server, make_store: MakeStore, pages: Pages
) -> None:
    store = make_store(unix_server.endpoint)
    there = filled(store)
    at = store.status().revision

    def change() -> None:
        store.put("/m/a/9", b"changed")
        store.put("/m/a/99", b"added")
        store.delete("/m/b/9")

    pages.between = change
    pages.sizes.clear()
    found, revision = store.get_ranges([A, B])
    assert {kv.key: kv.value for kv in found} == there and revision == at
    assert max(pages.sizes) <= PAGE and sum(pages.sizes) == len(there)
    pages.between = lambda: None
    assert [kv.key for kv in store.get_prefix("/m/a/")[0]] == sorted(
        [*(k for k in there if "a" in k), "/m/a/99"]
    )
    assert max(pages.sizes) <= PAGE


def test_a_read_whose_revision_is_compacted_begins_anew(
    unix_server: Server, make_store: MakeStore, pages: Pages
) -> None:
    store = make_store(unix_server.endpoint)
    filled(store)

    def compact() -> None:
        store.put("/m/a/0", b"new")
        store.compact(store.status().revision)

    def once() -> None:
        pages.between = lambda: None
        compact()

    pages.between = once
    found, _ = store.get_ranges([A])
    assert len(found) == 10 and found[0].value == b"new"
    pages.between = compact
    with pytest.raises(StoreUnavailable, match="compacted again and again"):
        store.get_ranges([A])


def test_a_mirror_reads_pages_at_its_start_and_after_a_loss(
    server: Server, make_store: MakeStore, pages: Pages
) -> None:
    store = make_store(server.endpoint)
    filled(store)
    pages.sizes.clear()
    changes: Recorder[Any] = Recorder()
    connection: Recorder[bool] = Recorder()
    mirror = Mirror(store, [A, B], changes, connection)
    mirror.start()
    try:
        connection.wait_for(lambda c: c == [True])
        server.kill()
        connection.wait_for(lambda c: c == [True, False])
        server.restart()
        connection.wait_for(lambda c: c == [True, False, True])
        store.put("/m/b/9", b"changed")
        wait_until(lambda: mirror.value("/m/b/9") == b"changed")
        assert [len(batch) for batch in changes.calls] == [20, 1], "the state was confirmed, page by page"
    finally:
        mirror.stop()
    assert max(pages.sizes) <= PAGE and sum(pages.sizes) >= 2 * 20
