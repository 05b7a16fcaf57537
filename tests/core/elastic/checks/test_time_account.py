"""The account of a worker's time: nothing is lost, nothing counts twice."""

from __future__ import annotations

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_contract.records import Generation, GenerationKind
from bagua_contract.time_use import STEP_TIME_BOUNDS_S, TimeUse
from bagua_core.elastic.checks.time_account import FailedWait, TimeAccount, use_of_entry, use_of_failed_wait

seconds = st.floats(0.0, 1e4)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(TimeUse), seconds, st.lists(st.tuples(st.sampled_from(TimeUse), st.floats(0, 1)))
        )
    )
)
def test_the_uses_sum_up_to_the_time_since_the_start(
    laps: list[tuple[TimeUse, float, list[tuple[TimeUse, float]]]],
) -> None:
    """parts: shares of what is left of the lap, each with a use of its own."""
    now_s = 100.0
    account = TimeAccount(now_s)
    for use, lap_s, parts in laps:
        left_s = lap_s
        for other, share in parts:
            account.part(other, left_s * share)
            left_s -= left_s * share
        now_s += lap_s
        account.lap(use, now_s)
    assert sum(account.seconds.values()) == pytest.approx(now_s - 100.0, abs=1e-6)


def test_a_part_of_a_lap_is_not_counted_again() -> None:
    account = TimeAccount(0.0)
    account.part(TimeUse.CHECKPOINT, 2.0)
    account.lap(TimeUse.STEP, 5.0)
    assert account.seconds == {TimeUse.CHECKPOINT: 2.0, TimeUse.STEP: 3.0}


@given(st.lists(seconds))
def test_each_step_is_in_the_first_bound_that_holds_it(steps: list[float]) -> None:
    account = TimeAccount(0.0)
    for step_s in steps:
        account.step(step_s)
    for number, bound in enumerate(STEP_TIME_BOUNDS_S):
        assert sum(account.step_counts[: number + 1]) == bisect.bisect_right(sorted(steps), bound)
    assert sum(account.step_counts) == len(steps)
    assert account.step_sum_s == pytest.approx(sum(steps))


@pytest.mark.parametrize(
    ("aside", "kind", "use"),
    [
        (TimeUse.START, GenerationKind.PLANNED, TimeUse.START),
        (TimeUse.WAITING, GenerationKind.FAILOVER, TimeUse.WAITING),
        (None, GenerationKind.FAILOVER, TimeUse.FAILOVER),
        (None, GenerationKind.PLANNED, TimeUse.SWITCH),
    ],
)
def test_what_the_time_before_a_generation_was_for(
    aside: TimeUse | None, kind: GenerationKind, use: TimeUse
) -> None:
    assert use_of_entry(aside, Generation(number=4, base=3, kind=kind, members=())) is use


@pytest.mark.parametrize(
    ("waited_s", "threshold_s", "use"),
    [
        (0.0, 0.25, TimeUse.FAILED_STEP),  # a connection was closed
        (0.9, 0.25, TimeUse.FAILED_STEP),  # a host vanished
        (2.0, 0.25, TimeUse.HANG),
        (9.0, 12.0, TimeUse.FAILED_STEP),  # its waits are long
        (13.0, 12.0, TimeUse.HANG),
    ],
)
def test_the_length_of_the_last_wait_tells_a_hang_from_a_loss(
    waited_s: float, threshold_s: float, use: TimeUse
) -> None:
    found, reason = use_of_failed_wait(FailedWait(waited_s, threshold_s))
    assert found is use and f"{waited_s:.1f} s" in reason


def test_what_a_change_took_is_counted_once() -> None:
    account = TimeAccount(0.0)
    account.lap(TimeUse.START, 5.0)
    assert account.take_lost() == {}
    account.lap(TimeUse.STEP, 6.0)
    account.lap(TimeUse.FAILED_STEP, 6.5)
    account.lap(TimeUse.FAILOVER, 8.5)
    assert account.take_lost() == {"failed_step": pytest.approx(0.5), "failover": pytest.approx(2.0)}
    account.lap(TimeUse.CHECKPOINT, 9.0)
    assert account.take_lost() == {}


def test_computing_is_a_step_without_its_waits() -> None:
    account = TimeAccount(0.0)
    account.step(1.0, 0.75)
    account.step(0.5, 0.6)
    assert (account.step_sum_s, account.computing_s) == (1.5, 0.25)
