"""Values are written at every normal end of a process; a store that hangs delays no process for long."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from bagua_core.cache.keys import digest_of
from bagua_core.cache.stores import Item, NoStore, Written
from bagua_core.cache.write_behind import WriteBehind
from tests.lab.wait import eventually


class Kept(NoStore):
    """Keeps what is written, while its gate is open."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []
        self.writes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def write(self, items: Sequence[Item]) -> Written:
        self.entered.set()
        assert self.gate.wait(30)
        self.kept += [item.key for item in items]
        self.writes.append(len(items))
        return Written(stored=len(items))


def item(number: int) -> Item:
    return Item(digest_of(number), bytearray(b"%d" % number))


def ignored(written: Written) -> None:
    pass


def test_closing_writes_all_that_was_put() -> None:
    for size in (1, 2, 20, 1000):
        store = Kept()
        reports: list[Written] = []
        writer = WriteBehind(store, size, reports.append)
        assert all(writer.put(item(i)) for i in range(100))
        assert writer.close() == 0
        assert store.kept == [item(i).key for i in range(100)]
        assert sum(written.stored for written in reports) == 100
        assert max(store.writes) <= size
        assert not writer.put(item(5)), "it is closed"


def test_frames_are_written_together_but_not_kept_waiting() -> None:
    store = Kept()
    writer = WriteBehind(store, 20, ignored)
    for i in range(100):
        writer.put(item(i))
    writer.flush(10)
    assert len(store.writes) <= 25
    writer.put(item(1000))
    eventually(lambda: item(1000).key in store.kept, 5, "a single frame is written without being asked for")
    writer.close()


def test_a_full_buffer_waits_for_the_store() -> None:
    store = Kept()
    store.gate.clear()
    writer = WriteBehind(store, 4, ignored, patience_s=30)
    for i in range(4):
        assert writer.put(item(i))
    done = threading.Event()

    def one_more() -> None:
        assert writer.put(item(4))
        done.set()

    waiting = threading.Thread(target=one_more)
    waiting.start()
    assert store.entered.wait(10)
    assert not done.wait(0.2), "no room yet"
    store.gate.set()
    assert done.wait(10)
    waiting.join()
    assert writer.close() == 0 and len(store.kept) == 5


def test_a_store_that_hangs_costs_one_wait_and_drops() -> None:
    store = Kept()
    store.gate.clear()
    writer = WriteBehind(store, 2, ignored, patience_s=0.1)
    results = [writer.put(item(i)) for i in range(1000)]
    assert results[:2] == [True, True] and not any(results[2:])
    assert writer.close(within_s=0.1) == 2
    store.gate.set()


def test_it_takes_more_once_the_store_moves_again() -> None:
    store = Kept()
    store.gate.clear()
    writer = WriteBehind(store, 2, ignored, patience_s=0.1)
    assert [writer.put(item(i)) for i in range(3)] == [True, True, False]
    store.gate.set()
    assert writer.flush(10)
    assert writer.put(item(9)) and writer.close() == 0
    assert store.kept == [item(i).key for i in (0, 1, 9)]


def test_what_is_on_its_way_is_found() -> None:
    store = Kept()
    store.gate.clear()
    writer = WriteBehind(store, 10, ignored)
    writer.put(item(1))
    assert store.entered.wait(10)
    writer.put(item(2))
    assert writer.pending(item(1).key) == b"1" and writer.pending(item(2).key) == b"2"
    assert writer.pending(item(3).key) is None
    store.gate.set()
    assert writer.flush(10) and writer.pending(item(1).key) is None
    writer.close()


def test_a_store_that_raises_delays_no_reader(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Kept):
        def write(self, items: Sequence[Item]) -> Written:
            super().write(items)
            raise RuntimeError("no store should do this")

    store = Broken()
    store.gate.clear()
    reports: list[Written] = []
    writer = WriteBehind(store, 2, reports.append, patience_s=30)
    assert writer.put(item(0)) and writer.put(item(1))
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(writer.put(item(2))))
    waiting.start()  # the buffer is full
    assert store.entered.wait(10)
    store.gate.set()
    waiting.join(10)
    assert answers == [False], "not the whole of the patience"
    assert not writer.put(item(3)) and writer.flush(0) and writer.close() == 0
    assert sum(written.lost for written in reports) == 2
    assert [record.message for record in caplog.records] == [
        "the cache's writer failed and ends; values are loaded anew from now on"
    ]
    assert "no store should do this" in caplog.text
