"""The bounded queue between readers of streams and the terminal: it holds back, and it lets go."""

from __future__ import annotations

import queue
import threading

import pytest

from bagua_agent.cluster_client.arrivals import Arrivals
from tests.lab.wait import eventually

DEADLINE_S = 10.0


def test_a_source_that_is_ahead_waits_for_room() -> None:
    arrivals: Arrivals[str, int] = Arrivals(most=2)
    ended = threading.Event()

    def send() -> None:
        for number in range(5):
            arrivals.put("a", number)
        ended.set()

    thread = threading.Thread(target=send)
    thread.start()
    got = [arrivals.get(DEADLINE_S) for _ in range(5)]
    thread.join(DEADLINE_S)
    assert got == [("a", n) for n in range(5)] and ended.is_set()
    assert not arrivals.holds("a")
    with pytest.raises(queue.Empty):
        arrivals.get(0.0)


def test_what_waits_for_room_is_held_and_closing_releases_it() -> None:
    arrivals: Arrivals[str, int] = Arrivals(most=1)
    arrivals.put("a", 1)
    thread = threading.Thread(target=lambda: arrivals.put("b", 2))
    thread.start()
    eventually(lambda: arrivals.holds("b"), DEADLINE_S, "the second one waits")
    assert thread.is_alive()
    arrivals.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    arrivals.put("c", 3)  # dropped
    with pytest.raises(queue.Empty):
        arrivals.get(0.0)
