"""The cost of faults, from times of steps written by hand."""

from __future__ import annotations

import pytest

from benchmarks.chaos_account import TWO_AT_ONCE, Happened, costs, goodput, percentile, usual_gaps_s
from benchmarks.committed_steps import Committed


def steps(*parts: tuple[int, int, float, int, float]) -> list[Committed]:
    """Each part: generation, world size, time of its first step, how many, gap."""
    made: list[Committed] = []
    for generation, world, begin_s, count, gap_s in parts:
        for number in range(count):
            made.append(Committed(len(made) + 1, begin_s + number * gap_s, generation, world))
    return made


# four workers until 10.0, a loss that costs a second, three from 11.0, four again from 16.0
LOSS_AND_JOIN = steps((1, 4, 0.0, 101, 0.1), (2, 3, 11.0, 50, 0.1), (3, 4, 16.0, 41, 0.1))


def test_usual_gaps_are_of_one_generation() -> None:
    assert usual_gaps_s(LOSS_AND_JOIN) == {4: pytest.approx(0.1), 3: pytest.approx(0.1)}


def test_goodput_counts_no_standing_still() -> None:
    assert goodput(LOSS_AND_JOIN, 0.0, 20.0) == pytest.approx((20.0 - 0.9) / 20.0, abs=0.002)
    assert goodput(LOSS_AND_JOIN, 0.0, 10.0) == pytest.approx(1.0, abs=0.002)
    assert goodput([], 0.0, 10.0) == 0.0
    assert goodput(LOSS_AND_JOIN, 5.0, 5.0) == 0.0


def test_recovery_and_pause() -> None:
    events = [
        Happened("host killed", 10.02, 12.0),
        Happened("node joins", 12.0, 18.0, is_join=True, joined_s=16.0),
        Happened("agent frozen", 18.0, 20.0),
    ]
    killed, joined, frozen = costs(LOSS_AND_JOIN, events)
    assert killed.recovery_s == pytest.approx(0.98) and killed.pause_s == pytest.approx(0.9)
    assert joined.recovery_s == pytest.approx(4.0) and joined.pause_s == pytest.approx(0.0, abs=0.02)
    assert frozen.recovery_s is None and frozen.pause_s == pytest.approx(0.0, abs=1e-6)


def test_a_join_of_another_node_is_no_recovery() -> None:
    (cost,) = costs(LOSS_AND_JOIN, [Happened("worker frozen", 15.0, 18.0)])
    assert cost.recovery_s is None
    (leave,) = costs(LOSS_AND_JOIN, [Happened("node leaves", 15.0, 18.0, is_leave=True)])
    assert leave.recovery_s == pytest.approx(1.0)


def test_two_at_once_are_not_told_apart() -> None:
    events = [
        Happened("host killed", 10.02, 10.3),
        Happened("node joins", 10.3, 18.0, at_once=True, is_join=True, joined_s=None),
        Happened("agent frozen", 18.0, 20.0),
    ]
    found = costs(LOSS_AND_JOIN, events)
    assert [cost.kind for cost in found] == [TWO_AT_ONCE, TWO_AT_ONCE, "agent frozen"]
    assert [cost.recovery_s for cost in found] == [None, None, None]
    assert found[0].pause_s == pytest.approx(0.9), "seen though the next event came before the recovery"


def test_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert percentile([5.0], 0.99) == 5.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
