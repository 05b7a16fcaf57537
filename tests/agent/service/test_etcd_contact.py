"""Whether a daemon may put back what it remembers, after being cut off, frozen or asleep."""

from __future__ import annotations

from bagua_agent.service.etcd_contact import SETTLED_AFTER_S, EtcdContact

LONG_S = 1000.0


def in_touch() -> EtcdContact:
    contact = EtcdContact(LONG_S, 0.0)
    contact.connected(True, 1.0)
    return contact


def test_one_that_is_in_touch_may() -> None:
    contact = in_touch()
    for n in range(100):
        contact.passed(60.0 * n)
    assert contact.may_put_back


def test_a_short_outage_changes_nothing() -> None:
    contact = in_touch()
    contact.connected(False, 10.0)
    contact.passed(10.0 + LONG_S - 20.0)
    assert contact.may_put_back


def test_after_a_long_outage_it_waits_until_it_has_heard_all() -> None:
    contact = in_touch()
    contact.connected(False, 10.0)
    now_s = 10.0
    for _ in range(30):
        now_s += 60.0
        contact.passed(now_s)
    assert not contact.may_put_back, "removals are reported before the connection counts as up"
    contact.connected(True, now_s)
    contact.passed(now_s + SETTLED_AFTER_S / 2)
    assert not contact.may_put_back
    contact.passed(now_s + SETTLED_AFTER_S + 1.0)
    assert contact.may_put_back


def test_one_that_was_frozen_takes_the_time_for_an_outage() -> None:
    """It was not notified that the connection broke."""
    contact = in_touch()
    contact.passed(60.0)
    contact.passed(60.0 + LONG_S + 1.0)
    assert not contact.may_put_back
    contact.passed(60.0 + LONG_S + SETTLED_AFTER_S + 3.0)
    assert contact.may_put_back
