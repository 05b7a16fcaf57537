"""The pure decisions of a step by themselves: the switch pair's arithmetic, the heal plan, the kept steps."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_contract.records import StateName
from bagua_core.elastic.heal import heal_plan
from bagua_core.elastic.membership import switch_pair
from bagua_core.elastic.state.commit_history import Entry, History

NONE = StateName()


def _fp32(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    assert isinstance(rounded, float)
    return rounded


def _sum_fp32(values: Iterable[float]) -> float:
    total = 0.0
    for value in values:
        total = _fp32(total + value)
    return total


@given(st.lists(st.integers(0, switch_pair.LARGEST_LEAP), min_size=1, max_size=64))
def test_ranks_agree_exactly_when_all_bring_the_same_leap(leaps: list[int]) -> None:
    vs = [switch_pair.contribution(7 + leap, 7, True) for leap in leaps]
    pair = (_sum_fp32(vs), _sum_fp32(v * v for v in vs))
    expected = leaps[0] if len(set(leaps)) == 1 and leaps[0] else None
    assert switch_pair.agreed(pair, len(leaps)) == expected


@pytest.mark.parametrize("odd", [0, 63])
def test_one_other_rank_of_the_largest_world_is_noticed(odd: int) -> None:
    vs = [64.0] * (switch_pair.LARGEST_WORLD - 1) + [float(odd)]
    assert switch_pair.agreed((_sum_fp32(vs), _sum_fp32(v * v for v in vs)), len(vs)) is None
    vs[-1] = 64.0
    assert switch_pair.agreed((_sum_fp32(vs), _sum_fp32(v * v for v in vs)), len(vs)) == 64


def test_what_was_not_built_or_is_old_counts_as_nothing() -> None:
    assert switch_pair.contribution(9, 7, False) == 0
    assert switch_pair.contribution(None, 7, True) == 0
    assert switch_pair.contribution(7, 7, True) == 0


@given(st.integers(1, switch_pair.LARGEST_WORLD), st.booleans())
def test_the_largest_leap_of_each_world_is_exact_and_a_larger_one_counts_as_nothing(
    world_size: int, one_differs: bool
) -> None:
    leap = switch_pair.largest_leap(world_size)
    assert leap >= switch_pair.LARGEST_LEAP and switch_pair.largest_leap(2) == 2896
    v = switch_pair.contribution(7 + leap, 7, True, world_size)
    assert v == leap and switch_pair.contribution(8 + leap, 7, True, world_size) == 0
    vs = [v] * (world_size - 1) + [v - 1 if one_differs else v]
    agreed = switch_pair.agreed((_sum_fp32(vs), _sum_fp32(v * v for v in vs)), world_size)
    assert agreed == (leap - one_differs if world_size == 1 or not one_differs else None)


def test_what_is_no_sum_of_pairs_is_refused() -> None:
    for pair, world_size in [((1.0, 1.0), 4097), ((0.5, 0.5), 2), ((1.0, 2.0**25), 2), ((-1.0, 1.0), 2)]:
        with pytest.raises(ValueError):
            switch_pair.agreed(pair, world_size)


def test_the_furthest_name_wins_and_only_newcomers_copy_beside_the_step() -> None:
    names = [StateName(3, 7, 0), StateName(4, 8, 0), StateName(4, 8, 0), NONE]
    plan = heal_plan.plan(names, [False] * 4, [1, 1, 1, 5])
    assert (plan.furthest, plan.holders) == (StateName(4, 8, 0), (1, 2))
    assert (plan.at_once, plan.beside) == (frozenset({0}), frozenset({3}))


def test_a_rank_outside_a_step_makes_all_copy_at_once() -> None:
    plan = heal_plan.plan([StateName(4, 8, 1), NONE], [True, False], [1, 5])
    assert (plan.at_once, plan.beside) == (frozenset({1}), frozenset())


def test_a_name_from_before_an_interruption_counts_as_none() -> None:
    plan = heal_plan.plan([StateName(4, 8, 0), StateName(5, 9, 0)], [False] * 2, [1, 6])
    assert (plan.holders, plan.beside) == ((0,), frozenset({1}))


def test_without_any_commit_rank_0_gives_its_initial_state() -> None:
    plan = heal_plan.plan([NONE, NONE], [False, False], [1, 1])
    assert plan.initial
    assert (plan.holders, plan.at_once) == ((0,), frozenset({1}))


def test_a_plan_of_different_worlds_is_refused() -> None:
    with pytest.raises(ValueError, match="not one world"):
        heal_plan.plan([NONE], [False, False], [1])


def _entry(step: int, generation: int = 1) -> Entry:
    return Entry(generation, step, (("batch", step), ("epoch", 0)), ("a", "b", "c"), frozenset({2}), 1.5)


def test_in_steady_state_two_steps_are_kept_and_each_line_is_written_once() -> None:
    history, written = History(), []
    for step in range(1, 9):
        history, lines = history.collective_completed(step, frozenset(), "a", {"a", "b", "c"})
        written += [(line.entry.step, line.global_rank) for line in lines]
        history = history.committed(_entry(step))
    assert written == [(step, 0) for step in range(1, 8)]
    assert [k.entry.step for k in history.kept] == [7, 8]


def test_a_history_travels_whole() -> None:
    history = History().committed(_entry(1))
    history, _ = history.collective_completed(2, frozenset(), "a", {"a", "b", "c"})
    history = history.committed(_entry(2))
    assert History.decode(history.encode()) == history


def test_a_step_that_does_not_follow_is_refused() -> None:
    with pytest.raises(ValueError, match="committed after"):
        History().committed(_entry(1)).committed(_entry(3))


# -- which members copy what


def test_a_member_that_has_every_step_copies_results_only() -> None:
    """It waits in a collective after the step; the other's script has gone on from there."""
    plan = heal_plan.plan([StateName(4, 8, 2), StateName(4, 8, 1)], [True, True], [1, 1])
    assert (plan.at_once, plan.replaying, plan.rounds) == ({1}, {1}, ())


@pytest.mark.parametrize(
    ("what", "name", "outside", "parts"),
    [
        ("behind by a step", StateName(4, 7, 3), True, 0),
        ("at a boundary, without a final part of the step", StateName(4, 8, 1), False, 0),
        ("in a collective, and a part of the step is final", StateName(4, 8, 1), True, 1),
        ("lost its state in a copy", NONE, True, 0),
    ],
)
def test_all_others_that_are_behind_copy_the_state(
    what: str, name: StateName, outside: bool, parts: int
) -> None:
    plan = heal_plan.plan([StateName(4, 8, 2), name], [parts == 0, outside], [1, 1], parts=[parts, 0])
    assert plan.at_once == {1} and not plan.replaying and plan.rounds == ({1},), what


def test_holders_of_another_layout_send_nothing() -> None:
    names = [StateName(4, 8)] * 3 + [NONE]
    plan = heal_plan.plan(names, [False] * 4, [1, 1, 1, 5], layouts=[7, 9, 7, 0])
    assert plan.holders == (0, 1, 2) and plan.sources == (0, 2)


def test_one_that_joined_and_has_not_committed_is_no_holder_beside_others() -> None:
    """It copied at once while others stood outside a step, and has not followed what their scripts did since."""
    names = [StateName(4, 8, 1), StateName(4, 8, 1)]
    plan = heal_plan.plan(names, [False, False], [1, 4], joining=[False, True])
    assert plan.holders == (0,) and plan.newcomers == plan.beside == {1}
    alone = heal_plan.plan(names[1:], [False], [4], joining=[True])
    assert alone.holders == (0,) and not alone.healing
