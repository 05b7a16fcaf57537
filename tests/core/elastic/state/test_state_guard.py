"""The guard of the committed state when another thread leaves in the script's place."""

from __future__ import annotations

import threading
import time

import pytest

from bagua_core.elastic.state.state_guard import StateBusy, StateGuard
from bagua_core.errors import LeaveInterrupt
from tests.core.communication.worlds import DEADLINE_S


def in_thread(run: object) -> threading.Thread:
    thread = threading.Thread(target=run)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_a_reader_does_not_wait_for_ever_for_the_script() -> None:
    guard, holds, over = StateGuard(), threading.Event(), threading.Event()

    def script() -> None:
        with guard.held(), guard.held():
            holds.set()
            assert over.wait(DEADLINE_S)

    thread = in_thread(script)
    assert holds.wait(DEADLINE_S)
    with pytest.raises(StateBusy), guard.reading(0.05):
        pytest.fail("the script holds it")
    over.set()
    thread.join(DEADLINE_S)
    with guard.reading(DEADLINE_S) as work:
        assert work is not None, "what the device was given before the script let go"


def test_the_script_changes_nothing_once_it_was_taken_out() -> None:
    guard, caught, reading = StateGuard(), [], threading.Event()

    def script() -> None:
        assert reading.wait(DEADLINE_S)
        for attempt in (guard.check, lambda: guard.held().__enter__()):
            try:
                attempt()
            except LeaveInterrupt:
                caught.append(time.monotonic())

    thread = in_thread(script)
    with guard.reading(DEADLINE_S):
        reading.set()
        guard.take_out(time.monotonic() + DEADLINE_S)
        with guard.held():  # the thread itself may: it commits in the script's place
            guard.check()
    saved_s = time.monotonic()
    deadline_s = saved_s + DEADLINE_S
    while not guard.taken_out():
        assert time.monotonic() < deadline_s, "the script meets the leave"
    thread.join(DEADLINE_S)
    assert len(caught) == 2 and min(caught) >= saved_s, "it sees the leave when that is done"


def test_no_thread_waits_for_a_leave_beyond_its_time() -> None:
    guard = StateGuard()
    in_thread(lambda: guard.take_out(time.monotonic() + 0.05)).join()
    with pytest.raises(LeaveInterrupt):
        guard.check()
    guard.wait_out()
    assert guard.is_taken_out
