"""Events that arrive together are decided together, no event overtakes another, and a small job does not wait."""

from __future__ import annotations

import queue
import threading
import time

from bagua_agent.base.timers import Timers
from bagua_agent.etcd.mirror import Change
from bagua_agent.job.batching import InboxReader
from bagua_agent.job.messages import Gathered, StoreChanged, StoreConnected
from bagua_agent.large_jobs.limits import Limits

LARGE = Limits(whole_picture_nodes=1)


def changed(key: str) -> StoreChanged:
    return StoreChanged((Change(key, b"", 1, 1),))


def reader() -> tuple[InboxReader, queue.SimpleQueue[object]]:
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    return InboxReader(inbox, Timers()), inbox


def keys(message: object) -> list[str]:
    assert isinstance(message, Gathered)
    return [change.key for change in message.changes]


def test_what_has_come_by_now_is_one_message_and_what_is_behind_it_stays_behind() -> None:
    one, inbox = reader()
    for message in (changed("a"), changed("b"), StoreConnected(False), changed("c")):
        inbox.put(message)
    assert keys(one.next()) == ["a", "b"]
    assert one.next() == StoreConnected(False)
    assert keys(one.next()) == ["c"]


def test_a_due_timer_comes_before_the_next_message() -> None:
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    timers = Timers()
    timers.set("due", time.monotonic() + 0.05, lambda now_s: None)
    began_s = time.monotonic()
    assert InboxReader(inbox, timers).next() is None
    assert time.monotonic() - began_s < 0.9, "not the whole look around"


def test_a_small_job_waits_for_nothing() -> None:
    one, inbox = reader()
    inbox.put(changed("a"))
    assert keys(one.next()) == ["a"]
    one.decided(time.monotonic() - 10.0, Limits(), 3)
    inbox.put(changed("b"))
    began_s = time.monotonic()
    assert keys(one.next()) == ["b"]
    assert time.monotonic() - began_s < 0.2


def test_after_a_long_decision_a_large_job_gathers_what_comes_meanwhile() -> None:
    one, inbox = reader()
    inbox.put(changed("a"))
    one.next()
    one.decided(time.monotonic() - 10.0, LARGE, 5)  # so the longest time to gather
    inbox.put(changed("b"))
    late = threading.Timer(0.1, lambda: inbox.put(changed("c")))
    late.start()
    began_s = time.monotonic()
    assert keys(one.next()) == ["b", "c"]
    assert time.monotonic() - began_s < LARGE.longest_gathering_s + 3.0
    late.join()


def test_what_is_of_another_kind_ends_the_gathering() -> None:
    """A signal or a worker's word must not wait."""
    one, inbox = reader()
    one.decided(time.monotonic() - 10.0, LARGE, 5)
    inbox.put(changed("a"))
    inbox.put(StoreConnected(True))
    began_s = time.monotonic()
    assert keys(one.next()) == ["a"]
    assert time.monotonic() - began_s < 0.3
    assert one.next() == StoreConnected(True)
