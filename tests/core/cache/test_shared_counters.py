"""Counts of all processes add up, also of those that were killed, and the rows of the dead are used again."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from bagua_core.cache import counters
from bagua_core.cache.counters import SharedCounters
from bagua_core.cache.errors import StoreFault


def count(path: Path, times: int, pause: bool = False) -> None:
    one = SharedCounters(path)
    for _ in range(times):
        one.add(hits=1, misses=2)
    if pause:
        (path / "counted").touch()
        multiprocessing.Event().wait()


def test_processes_add_up(tmp_path: Path) -> None:
    here = SharedCounters(tmp_path)
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        processes = [context.Process(target=count, args=(tmp_path, 5000)) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)
            assert process.exitcode == 0
    here.add(hits=5, unreadable=1, dropped=0)
    totals = here.totals()
    assert (totals["hits"], totals["misses"], totals["unreadable"]) == (45005, 90000, 1)
    here.close()
    assert here.totals() == totals == SharedCounters(tmp_path).totals()


def test_rows_of_ended_processes_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_ROWS", 3)
    held = [SharedCounters(tmp_path) for _ in range(2)]
    for turn in range(10):
        one = SharedCounters(tmp_path)
        one.add(hits=1)
        assert one.totals()["hits"] == turn + 1
        with pytest.raises(StoreFault, match="more than 3 processes"):
            SharedCounters(tmp_path)
        one.close()
        del one
    assert held[0].totals()["hits"] == 10


def test_without_a_directory_it_counts_alone() -> None:
    one, other = SharedCounters(None), SharedCounters(None)
    one.add(stored=2)
    assert (one.totals()["stored"], other.totals()["stored"]) == (2, 0)
