"""Named timers come due once, in time, and can be moved and taken back."""

from __future__ import annotations

import threading

from bagua_agent.base.timers import Timers


def fired_by(timers: Timers, now_s: float) -> int:
    due = timers.take_due(now_s)
    for call in due:
        call(now_s)
    return len(due)


def test_a_timer_comes_due_once_and_is_told_the_time() -> None:
    timers, fired = Timers(), []
    timers.set("a", 10.0, fired.append)
    assert fired_by(timers, 9.99) == 0
    assert fired_by(timers, 10.5) == 1
    assert fired_by(timers, 20.0) == 0
    assert fired == [10.5]


def test_the_wait_is_until_the_first() -> None:
    timers = Timers()
    assert timers.next_in_s(5.0) == float("inf")
    timers.set("late", 30.0, lambda _: None)
    timers.set("soon", 10.0, lambda _: None)
    assert timers.next_in_s(4.0) == 6.0
    assert timers.next_in_s(11.0) == 0.0, "never a negative wait"
    timers.take_due(10.0)
    assert timers.next_in_s(10.0) == 20.0


def test_setting_a_timer_again_replaces_it() -> None:
    timers, fired = Timers(), []
    timers.set("a", 10.0, lambda _: fired.append("first"))
    timers.set("a", 20.0, lambda _: fired.append("second"))
    fired_by(timers, 15.0)
    assert fired == []
    fired_by(timers, 20.0)
    assert fired == ["second"]


def test_set_once_keeps_the_time_of_the_first() -> None:
    timers, fired = Timers(), []
    timers.set_once("a", 10.0, lambda _: fired.append("first"))
    timers.set_once("a", 20.0, lambda _: fired.append("second"))
    fired_by(timers, 10.0)
    assert fired == ["first"]
    timers.set_once("a", 30.0, lambda _: fired.append("third"))
    fired_by(timers, 30.0)
    assert fired == ["first", "third"]


def test_a_cancelled_timer_never_fires() -> None:
    timers = Timers()
    timers.set("a", 10.0, lambda _: None)
    timers.cancel("a")
    timers.cancel("never set")
    assert fired_by(timers, 100.0) == 0


def test_a_timer_may_set_itself_again() -> None:
    timers, fired = Timers(), []

    def due(now_s: float) -> None:
        fired.append(now_s)
        timers.set("a", now_s + 1.0, due)

    timers.set("a", 0.0, due)
    assert [fired_by(timers, float(t)) for t in range(3)] == [1, 1, 1]
    assert fired == [0.0, 1.0, 2.0]


def test_threads_may_set_timers_while_the_loop_takes_them() -> None:
    timers = Timers()

    def set_many(thread: int) -> None:
        for n in range(200):
            timers.set_from_thread(f"{thread}-{n}", 1.0, lambda _: None)

    threads = [threading.Thread(target=set_many, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    taken = 0
    while any(thread.is_alive() for thread in threads):
        taken += len(timers.take_due(2.0))
    taken += len(timers.take_due(2.0))
    assert taken == 800
