"""One worker always holds the whole state, whatever copy fails: the plan's rounds, and the value of half a copy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_contract.records import StateName
from bagua_core.elastic.heal.heal_plan import HealPlan, StateGone, counted_name, plan
from bagua_core.elastic.membership import entry
from bagua_core.elastic.state.committed_state import Remains

ROW = st.tuples(
    st.sampled_from([StateName(), StateName(2, 5), StateName(3, 6), StateName(3, 6, 1)]),
    st.booleans(),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(Remains),
)


def whole_before(counted: list[StateName], drawn: HealPlan) -> set[int]:
    """Ranks that have every step of the holders."""
    return {r for r, name in enumerate(counted) if not name.is_none and name.step == drawn.furthest.step}


@given(st.lists(ROW, min_size=1, max_size=6))
def test_copies_never_touch_the_last_whole_state(
    rows: list[tuple[StateName, bool, int, bool, Remains]],
) -> None:
    names = [n if h is Remains.UNTOUCHED else StateName() for n, _, _, _, h in rows]
    outside, since, stages = ([r[i] for r in rows] for i in (1, 2, 3))
    half = [r[4] for r in rows]
    counted = [counted_name(n, s) for n, s in zip(names, since, strict=True)]
    try:
        drawn = plan(names, outside, since, stages, half)
    except StateGone as gone:
        assert all(name.is_none for name in counted) and all(
            half[r] is not Remains.UNTOUCHED for r in gone.ranks
        )
        return
    assert not drawn.healing & set(drawn.holders)
    assert drawn.void or all(half[r] is Remains.UNTOUCHED for r in drawn.holders)
    assert set().union(*drawn.rounds) == drawn.at_once - drawn.replaying
    assert drawn.replaying <= whole_before(counted, drawn), "they keep what they have"
    if drawn.initial:
        assert Remains.HALF_COMMITTED not in half
        return
    whole = {r for r, name in enumerate(counted) if not name.is_none}
    for number, receivers in enumerate(drawn.rounds):
        untouched = {r for r in whole if r not in receivers or stages[r]}
        assert set(drawn.holders) <= untouched
        waits_for_nobody = len(drawn.at_once - drawn.replaying) == 1
        if len(whole) > 1 and not waits_for_nobody:
            assert len(untouched) > 1, f"round {number} of {drawn}: the source alone would be left"
        whole |= receivers  # verified, all of them


@pytest.mark.parametrize(
    ("what", "names", "stages", "spared"),
    [
        ("two behind without memory", [(3, 6), (3, 5), (3, 5)], "nnn", {1}),
        ("the furthest of those behind", [(3, 6), (2, 5), (3, 5)], "nnn", {2}),
        ("one of them stages", [(3, 6), (3, 5), (3, 5)], "nny", set()),
        ("another source", [(3, 6), (3, 5), (3, 5), (3, 6)], "nnnn", set()),
        ("no other to wait for", [(3, 6), (3, 5)], "nn", set()),
        ("the usual case", [(3, 6), (3, 5), (3, 5)], "yyy", set()),
    ],
)
def test_who_is_spared(what: str, names: list[tuple[int, int]], stages: str, spared: set[int]) -> None:
    drawn = plan(
        [StateName(*n) for n in names], [False] * len(names), [1] * len(names), [s == "y" for s in stages]
    )
    assert drawn.spared == spared, what
    assert len(drawn.rounds) == (2 if spared else 1)


def test_a_plan_that_writes_over_a_holder_is_refused() -> None:
    with pytest.raises(ValueError, match="not a plan"):
        HealPlan(StateName(1, 1), (0, 1), frozenset({1}), frozenset(), False, "wrong")


def test_half_a_state_that_was_committed_ends_its_worker() -> None:
    with pytest.raises(StateGone) as caught:
        plan(
            [StateName()] * 3,
            [False] * 3,
            [1] * 3,
            None,
            [Remains.UNTOUCHED, Remains.HALF_COMMITTED, Remains.UNTOUCHED],
        )
    assert caught.value.ranks == (1,)


def test_a_job_begins_with_the_members_that_are_whole() -> None:
    drawn = plan(
        [StateName()] * 3,
        [False] * 3,
        [1] * 3,
        None,
        [Remains.HALF_INITIAL, Remains.UNTOUCHED, Remains.UNTOUCHED],
    )
    assert drawn.initial and drawn.holders == (1,) and drawn.at_once == {0, 2}


def test_a_job_does_not_begin_with_what_a_worker_trained_before_it_was_left_out() -> None:
    left, fresh = Remains.LEFT_OUT, Remains.UNTOUCHED
    drawn = plan([StateName()] * 3, [False] * 3, [7] * 3, None, [left, fresh, left])
    assert drawn.initial and not drawn.void
    assert drawn.holders == (1,) and drawn.at_once == {0, 2}
    dropped = plan([StateName(6, 40), StateName()], [False] * 2, [7] * 2)
    assert dropped.holders == (1,) and not dropped.void, "it has not noticed that it was left out"
    assert plan([StateName()], [False], [7], None, [left]).void
    assert plan([StateName(6, 40)], [False], [7]).void
    with pytest.raises(StateGone) as caught:
        plan([StateName()] * 3, [False] * 3, [7] * 3, None, [left, Remains.HALF_COMMITTED, fresh])
    assert caught.value.ranks == (1,)


def test_a_replica_with_a_shard_that_trained_is_no_beginning() -> None:
    dropped = entry.Info(StateName(6, 40), False, {"epoch": 0, "batch": 0})
    fresh = entry.Info(StateName(), False, {"epoch": 0, "batch": 0})
    assert entry.of_replica([dropped, dropped], [7, 7]).remains is Remains.LEFT_OUT
    assert entry.of_replica([fresh, fresh], [7, 7]).remains is Remains.UNTOUCHED
