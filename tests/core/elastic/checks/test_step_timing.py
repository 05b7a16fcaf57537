"""The waits that are reported, and the job's speed: arithmetic over durations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_core.elastic.checks.step_timing import (
    LEAST_STALL_S,
    MOST_STALL_S,
    USUAL_FACTOR,
    USUAL_OF_STEPS,
    Pace,
    UsualStep,
    WaitMonitor,
    moving_report_s,
)


def monitor(usual_s: float | None = None) -> WaitMonitor:
    waits = WaitMonitor()
    if usual_s is not None:
        waits.ended(usual_s)
    waits.begin()
    return waits


@pytest.mark.parametrize(
    ("usual_s", "threshold_s"), [(None, LEAST_STALL_S), (0.001, LEAST_STALL_S), (1.0, USUAL_FACTOR)]
)
def test_a_stall_is_longer_than_usual_and_than_noise(usual_s: float | None, threshold_s: float) -> None:
    waits = monitor(usual_s)
    assert waits.threshold_s == threshold_s
    assert not waits.is_stalled(threshold_s * 0.99)
    assert waits.is_stalled(threshold_s)


def test_further_reports_of_one_wait_come_later_and_later() -> None:
    waits = monitor()
    reported_s = [t / 100 for t in range(1000) if waits.is_stalled(t / 100)]
    assert reported_s == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]


def test_the_next_wait_is_reported_anew() -> None:
    waits = monitor()
    assert waits.is_stalled(100.0)
    waits.begin()
    assert waits.is_stalled(0.25)


def test_a_late_look_counts_from_when_it_looked() -> None:
    waits = monitor()
    assert waits.is_stalled(10.0)
    assert not waits.is_stalled(19.9)
    assert waits.is_stalled(20.0)


def test_what_is_usual_follows_slowly() -> None:
    waits = monitor(1.0)
    waits.ended(2.0)
    assert waits.threshold_s == pytest.approx(USUAL_FACTOR * 1.2)
    for _ in range(50):
        waits.ended(2.0)
    assert waits.threshold_s == pytest.approx(USUAL_FACTOR * 2.0, rel=1e-3)


@given(st.lists(st.floats(0, 1e4), max_size=20))
def test_the_threshold_never_falls_below_noise(waited_s: list[float]) -> None:
    waits = WaitMonitor()
    for each in waited_s:
        waits.ended(each)
    assert waits.threshold_s >= LEAST_STALL_S


def test_the_first_step_is_reported_and_then_the_pace() -> None:
    pace = Pace(report_every_s=1.0)
    assert pace.step_done(10.0)  # at once, so that the job shows that it runs
    assert pace.steps_per_s == 0.0
    due = [pace.step_done(10.0 + 0.25 * n) for n in range(1, 9)]
    assert due == [False, False, False, True, False, False, False, True]
    assert pace.steps_per_s == pytest.approx(4.0)


def test_a_slow_step_is_a_slow_pace() -> None:
    pace = Pace(0.25)
    pace.step_done(0.0)
    assert pace.step_done(20.0)
    assert pace.steps_per_s == pytest.approx(0.05)


def test_the_usual_step_follows_the_newest_steps_and_not_a_single_long_one() -> None:
    usual = UsualStep()
    usual.step_done(60.0)  # the first one builds kernels
    assert usual.seconds == 0.0
    usual.step_done(1.0)
    usual.step_done(300.0)  # with a checkpoint
    assert usual.seconds == 1.0
    for _ in range(USUAL_OF_STEPS):
        usual.step_done(4.0)  # with half of the workers
    assert usual.seconds == 4.0


def test_a_wait_is_told_of_however_long_the_usual_one_is() -> None:
    assert monitor(3600.0).threshold_s == MOST_STALL_S


@pytest.mark.parametrize(("members", "every_s"), [(1, 1.0), (200, 1.0), (1000, 5.0), (100_000, MOST_STALL_S)])
def test_a_large_job_reports_waits_for_arriving_bytes_less_often(members: int, every_s: float) -> None:
    assert moving_report_s(members) == every_s
