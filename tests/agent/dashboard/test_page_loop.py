"""When a page is looked at: not while no browser asks, at once when one does; a look that fails; the end."""

from __future__ import annotations

import json
import threading
import time

import pytest

from bagua_agent.dashboard import page_loop
from bagua_agent.dashboard.page_data import Page
from bagua_agent.dashboard.page_loop import LOOK_S, PageLoop
from tests.lab.wait import eventually

DEADLINE_S = 40.0


def test_nothing_is_read_until_a_browser_asks_and_a_problem_keeps_the_page() -> None:
    looks: list[int] = []
    again = threading.Event()

    def look() -> Page | str:
        looks.append(len(looks))
        if len(looks) > 1:
            again.set()
            return "etcd is away"
        return {"number": float("nan"), "what": "first"}

    loop = PageLoop(look, {"problem": "nothing yet"}, None)
    try:
        assert looks == [] and not loop.is_watched
        assert json.loads(loop.page()) == {"number": None, "what": "first"}, (
            "the first request waits for a look"
        )
        assert again.wait(DEADLINE_S), "a watched page is looked at again"
        found = json.loads(loop.page())
        while "problem" not in found:
            found = json.loads(loop.page())
        assert found == {"number": None, "what": "first", "problem": "etcd is away"}
    finally:
        loop.stop()


def test_a_look_that_raises_is_a_note_and_is_followed_by_the_next(caplog: pytest.LogCaptureFixture) -> None:
    looks: list[int] = []

    def look() -> Page:
        looks.append(len(looks))
        if len(looks) in (2, 3):
            raise OverflowError("cannot convert float infinity to integer")
        return {"number": len(looks)}

    loop = PageLoop(look, {}, None)
    notes = set[str]()

    def shown() -> int:
        found = json.loads(loop.page())
        notes.add(found.get("problem", ""))
        return int(found["number"])

    try:
        assert shown() == 1
        eventually(lambda: shown() > 3, DEADLINE_S, lambda: f"it looks again: {looks}, {notes}")
    finally:
        loop.stop()
    assert any("a bug of Bagua (OverflowError: " in note and "not new" in note for note in notes), notes
    assert caplog.text.count("a look for the dashboard raised") == 1, "once for a bug"


def test_every_open_page_gets_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_loop, "ALL_ASK_S", 3.0)  # threads of a loaded machine may ask late
    here = threading.current_thread()
    # the last look is made in the thread that stops; those of the loop before and after it show no end
    loop = PageLoop(lambda: {"over": threading.current_thread() is here}, {}, None)
    stopped = threading.Event()
    seen: list[list[bool]] = [[], []]

    def view(pages: list[bool]) -> None:
        while True:
            pages.append(bool(json.loads(loop.page())["over"]))
            if stopped.wait(LOOK_S):
                return

    viewers = [threading.Thread(target=view, args=(pages,)) for pages in seen]
    try:
        viewers[0].start()
        eventually(lambda: bool(seen[0]), DEADLINE_S, "the first page is open")
        stopped.wait(LOOK_S / 2)
        viewers[1].start()
        eventually(lambda: bool(seen[1]), DEADLINE_S, "the second page is open")
        loop.stop(shows_end=True)
        at_stop = [any(pages) for pages in seen]
    finally:
        stopped.set()
        loop.stop()
        for viewer in viewers:
            viewer.join(DEADLINE_S)
    assert at_stop == [True, True]
    assert all(pages[pages.index(True) :].count(False) == 0 for pages in seen), (
        "no look replaces the last page"
    )


def test_no_page_that_was_closed_is_waited_for_longer_than_for_an_open_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_loop, "LAST_PAGE_S", 0.1)
    monkeypatch.setattr(page_loop, "ALL_ASK_S", 10 * DEADLINE_S)
    loop = PageLoop(lambda: {"over": True}, {}, None)
    loop.page()
    began_s = time.monotonic()
    loop.stop(shows_end=True)
    assert time.monotonic() - began_s < DEADLINE_S
