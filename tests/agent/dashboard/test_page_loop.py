"""When a page is looked at: not while no browser asks, at once when one does; and what stays while a look fails."""

from __future__ import annotations

import json
import threading

import pytest

from bagua_agent.dashboard.page_data import Page
from bagua_agent.dashboard.page_loop import PageLoop
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
