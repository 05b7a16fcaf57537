"""Writes are tried until the store takes them, and the end does not wait for one that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from bagua_agent.desired_writes import RETRY_S, DesiredWrites
from bagua_agent.errors import StoreUnavailable
from bagua_agent.timers import Timers

DEADLINE_S = 10.0


@pytest.fixture
def timers() -> Timers:
    return Timers()


@pytest.fixture
def writes(timers: Timers) -> Iterator[DesiredWrites]:
    made = DesiredWrites(timers)
    yield made
    made.stop()


class Write:
    """Fails as often as told."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            raise StoreUnavailable("away")


def fire(timers: Timers) -> int:
    due = timers.take_due(time.monotonic() + 2 * RETRY_S)
    for call in due:
        call(time.monotonic())
    return len(due)


def test_it_is_tried_until_it_is_taken(writes: DesiredWrites, timers: Timers) -> None:
    write = Write(failures=2)
    writes.until_done("result", write)
    for _ in range(2):
        assert writes.flush(DEADLINE_S)
        assert fire(timers) == 1
    assert writes.flush(DEADLINE_S)
    assert write.calls == 3 and fire(timers) == 0


def test_one_that_fails_holds_up_no_other(writes: DesiredWrites) -> None:
    stuck, fine = Write(failures=99), Write(failures=0)
    writes.until_done("stuck", stuck)
    writes.until_done("fine", fine)
    assert writes.flush(DEADLINE_S)
    assert stuck.calls == fine.calls == 1


def test_a_retry_replaces_the_one_before_of_that_name(writes: DesiredWrites, timers: Timers) -> None:
    old, new = Write(failures=1), Write(failures=1)
    writes.until_done("key", old)
    writes.until_done("key", new)
    assert writes.flush(DEADLINE_S)
    assert fire(timers) == 1 and writes.flush(DEADLINE_S)
    assert (old.calls, new.calls) == (1, 2)


def test_the_last_words_do_not_wait_for_one_that_hangs(writes: DesiredWrites) -> None:
    let_go = threading.Event()
    writes.until_done("hangs", lambda: let_go.wait(DEADLINE_S))
    began = time.monotonic()
    assert not writes.flush(0.05)
    assert time.monotonic() - began < DEADLINE_S / 2
    let_go.set()
