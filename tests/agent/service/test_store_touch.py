"""Whether a daemon may put back what it remembers, after being cut off, frozen or asleep."""

from __future__ import annotations

from bagua_agent.service.store_touch import SETTLED_AFTER_S, StoreTouch

LONG_S = 1000.0


def in_touch() -> StoreTouch:
    touch = StoreTouch(LONG_S, 0.0)
    touch.connected(True, 1.0)
    return touch


def test_one_that_is_in_touch_may() -> None:
    touch = in_touch()
    for n in range(100):
        touch.passed(60.0 * n)
    assert touch.may_put_back


def test_a_short_outage_changes_nothing() -> None:
    touch = in_touch()
    touch.connected(False, 10.0)
    touch.passed(10.0 + LONG_S - 20.0)
    assert touch.may_put_back


def test_after_a_long_outage_it_waits_until_it_has_heard_all() -> None:
    touch = in_touch()
    touch.connected(False, 10.0)
    now_s = 10.0
    for _ in range(30):
        now_s += 60.0
        touch.passed(now_s)
    assert not touch.may_put_back, "removals are reported before the connection counts as up"
    touch.connected(True, now_s)
    touch.passed(now_s + SETTLED_AFTER_S / 2)
    assert not touch.may_put_back
    touch.passed(now_s + SETTLED_AFTER_S + 1.0)
    assert touch.may_put_back


def test_one_that_was_frozen_takes_the_time_for_an_outage() -> None:
    """It was not notified that the connection broke."""
    touch = in_touch()
    touch.passed(60.0)
    touch.passed(60.0 + LONG_S + 1.0)
    assert not touch.may_put_back
    touch.passed(60.0 + LONG_S + SETTLED_AFTER_S + 3.0)
    assert touch.may_put_back
