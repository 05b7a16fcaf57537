"""A loop is stuck after twenty ticks of the watch without a turn, and not a moment longer than that."""

from __future__ import annotations

import threading

from bagua_agent.job.loop_watch import STUCK_AFTER_S, TICK_S, LoopWatch
from bagua_agent.workers.start.warm_parent import FORK_TIMEOUT_S
from tests.lab.wait import HANG_S

TICKS = round(STUCK_AFTER_S / TICK_S)


def test_a_loop_is_stuck_after_its_ticks_and_until_its_next_turn() -> None:
    watch = LoopWatch()
    for _ in range(2):
        watch.turned()
        assert not watch.tick(), "a turn since the last one"
        assert [watch.tick() for _ in range(TICKS)] == [False] * (TICKS - 1) + [True]
        assert watch.is_stuck
        assert [watch.tick() for _ in range(TICKS)] == [False] * (TICKS - 1) + [True], (
            "once more for each span"
        )
        watch.turned()
        assert not watch.is_stuck


def test_a_loop_that_turns_now_and_then_is_never_stuck() -> None:
    watch = LoopWatch()
    for _ in range(5):
        watch.turned()
        assert not any(watch.tick() for _ in range(TICKS))
        assert not watch.is_stuck


def test_no_wait_of_a_turn_that_we_bound_is_as_long() -> None:
    assert STUCK_AFTER_S >= 2 * FORK_TIMEOUT_S


def test_the_thread_tells_and_ends() -> None:
    watch, stuck = LoopWatch(tick_s=0.001), threading.Event()
    before = set(threading.enumerate())
    watch.start(stuck.set)
    assert stuck.wait(HANG_S) and watch.is_stuck
    watch.stop()
    assert set(threading.enumerate()) <= before and not watch.is_stuck
