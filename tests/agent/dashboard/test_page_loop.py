"""When a page is looked at: not while no browser asks, at once when one does; and what stays while a look fails."""

from __future__ import annotations

import json
import threading

from bagua_agent.dashboard.page_data import Page
from bagua_agent.dashboard.page_loop import PageLoop

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
