"""Writes are tried until the store takes them, and the end does not wait for one that hangs."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator

import pytest

from bagua_agent.base.errors import StoreUnavailable, UserError
from bagua_agent.base.retrying_writes import LONGEST_RETRY_S, RETRY_S, DesiredWrites, retry_after_s
from bagua_agent.base.timers import Timers

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

    def __init__(self, failures: int, error: BaseException | None = None) -> None:
        self.failures = failures
        self.error = error or StoreUnavailable("away")
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error


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


@pytest.mark.parametrize(
    "error",
    [UserError("denied"), OSError(errno.ENOSPC, "disk full"), RuntimeError("bug"), MemoryError()],
    ids=repr,
)
def test_one_that_is_refused_is_not_forgotten(
    writes: DesiredWrites, timers: Timers, error: BaseException
) -> None:
    write = Write(failures=1, error=error)
    writes.until_done("failure of a worker", write)
    assert writes.flush(DEADLINE_S)
    assert fire(timers) == 1
    assert writes.flush(DEADLINE_S)
    assert write.calls == 2 and fire(timers) == 0


def test_an_outage_is_tried_evenly_and_a_refusal_ever_more_rarely() -> None:
    refused = [retry_after_s(UserError("denied"), failed) for failed in range(1, 1000)]
    assert refused == sorted(refused) and refused[0] == RETRY_S and refused[-1] == LONGEST_RETRY_S
    assert {retry_after_s(StoreUnavailable("away"), failed) for failed in range(1, 1000)} == {RETRY_S}
