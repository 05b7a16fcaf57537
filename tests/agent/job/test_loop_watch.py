"""A loop is stuck after twenty ticks of the watch without a turn, and not a moment longer than that."""

from __future__ import annotations

import threading

from bagua_agent.job.loop_watch import STUCK_AFTER_S, TICK_S, LoopWatch, stuck_line
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


def test_the_line_speaks_of_other_nodes_only_where_there_are_some() -> None:
    assert "the others may go on without this node" in stuck_line(alone=False)
    assert "others" not in stuck_line(alone=True)


def test_the_thread_tells_and_ends() -> None:
    watch, third = LoopWatch(tick_s=0.001), threading.Event()
    told: list[bool] = []

    def is_stuck(is_first: bool) -> None:
        told.append(is_first)
        if len(told) == 3:
            third.set()

    before = set(threading.enumerate())
    watch.start(is_stuck)
    assert third.wait(HANG_S) and watch.is_stuck
    assert told[:3] == [True, False, False]
    watch.stop()
    assert set(threading.enumerate()) <= before and not watch.is_stuck
