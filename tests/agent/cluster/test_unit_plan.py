"""Each rule of a daemon's actions on its units."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import OrderView, UnitState
from bagua_agent.cluster.slot_choice import choose
from bagua_agent.cluster.unit_plan import (
    AskUnitToLeave,
    OwnUnit,
    StartUnit,
    UnitPlan,
    UnitSituation,
    Wish,
    plan_units,
)

POLICY = ClusterPolicy()
NOW_S = 1000.0
RUN = {"x": Wish.RUN, "y": Wish.RUN}
LIVES = OwnUnit("x", True, (0, 1), 1, shutdown_timeout_s=10.0)
ENDED = OwnUnit("x", False, (), 1, ended_s=NOW_S - 1.0, exit_code=1, failures=1, reason="exit code 1")


def orders(*named: tuple[str, int]) -> tuple[OrderView, ...]:
    return tuple(OrderView(job_id, slots, number) for number, (job_id, slots) in enumerate(named, 1))


def decided(
    given_orders: tuple[OrderView, ...] | None,
    *units: OwnUnit,
    wishes: dict[str, Wish] | None = None,
    now_s: float = NOW_S,
    slots: int = 4,
) -> UnitPlan:
    return plan_units(
        UnitSituation(slots, given_orders, units, RUN if wishes is None else wishes), now_s, POLICY
    )


def state(todo: UnitPlan, job_id: str = "x") -> tuple[UnitState, str]:
    [unit] = [u for u in todo.report if u.job_id == job_id]
    return unit.state, unit.reason


# -- starting
def test_what_is_ordered_is_started_in_free_slots() -> None:
    todo = decided(orders(("x", 2), ("y", 1)))
    assert todo.starts == (StartUnit("x", (0, 1), 1), StartUnit("y", (2,), 2))
    assert state(todo) == (UnitState.WAITING, "is about to start")
    assert decided(orders(("x", 2), ("y", 1)), LIVES).starts == (StartUnit("y", (2,), 2),)


def test_it_waits_for_slots_until_they_are_free() -> None:
    todo = decided(orders(("y", 3)), LIVES)
    assert todo.starts == () and todo.asks == (AskUnitToLeave("x", "the node has other orders"),)
    assert state(todo, "y") == (UnitState.WAITING, "waits for 3 slots, 2 are free")
    assert decided(orders(("y", 3)), replace(LIVES, asked_since_s=NOW_S)).starts == ()
    assert decided(orders(("y", 3)), replace(LIVES, alive=False)).starts == (StartUnit("y", (0, 1, 2), 1),)


def test_of_too_many_orders_the_older_are_served() -> None:
    late = (OrderView("x", 3, 9), OrderView("y", 3, 2))
    assert decided(late).starts == (StartUnit("y", (0, 1, 2), 2),)


def test_nothing_is_started_without_a_wish_or_for_too_many_slots() -> None:
    todo = decided(orders(("x", 1)), wishes={})
    assert todo.starts == () and state(todo) == (UnitState.WAITING, "its submission is not known here yet")
    for wish in (Wish.STOP, Wish.OVER):
        todo = decided(orders(("x", 1)), wishes={"x": wish})
        assert todo.starts == () and state(todo)[0] is UnitState.ENDED
    for slots in (0, 5):
        todo = decided(orders(("x", slots)))
        assert todo.starts == () and state(todo) == (UnitState.REFUSED, f"asks {slots} slots, the node has 4")
    assert decided(None).starts == ()


def test_one_that_ended_is_started_again_later_each_time() -> None:
    failed = replace(ENDED, failures=3, ended_s=NOW_S)
    todo = decided(orders(("x", 2)), failed, now_s=NOW_S + 3.0)
    assert todo.starts == () and todo.again_at_s == NOW_S + 4.0
    assert state(todo) == (UnitState.WAITING, "is started again in 1 s: exit code 1")
    assert todo.report[0].failures == 3 and todo.report[0].exit_code == 1
    assert decided(orders(("x", 2)), failed, now_s=NOW_S + 4.0).starts == (StartUnit("x", (0, 1), 1),)


@pytest.mark.parametrize("unit", [replace(ENDED, failures=5), replace(ENDED, failures=0, refused=True)])
def test_one_that_is_given_up_is_remembered_for_a_while_with_or_without_an_order(unit: OwnUnit) -> None:
    until_s = unit.ended_s + POLICY.left_out_s
    expected = UnitState.REFUSED if unit.refused else UnitState.ENDED
    for given_orders in (orders(("x", 2)), (), None):
        todo = decided(given_orders, unit)
        assert (todo.starts, todo.forgets, todo.again_at_s) == ((), (), until_s)
        assert state(todo) == (expected, "exit code 1") or state(todo)[0] is expected
    assert decided((), unit, now_s=until_s).forgets == ("x",)
    again = decided(orders(("x", 2)), unit, now_s=until_s)
    assert again.forgets == ("x",) and again.starts == (StartUnit("x", (0, 1), 1),)
    assert decided((), unit, wishes={"x": Wish.OVER}).forgets == ("x",)


def test_what_ended_is_forgotten_once_nothing_asks_for_it() -> None:
    assert decided((), ENDED).forgets == ("x",) and decided((), ENDED).report == ()
    assert decided(orders(("x", 1)), ENDED).forgets == ()
    assert decided(None, ENDED).forgets == ()
    over = decided(orders(("x", 1)), ENDED, wishes={"x": Wish.OVER})
    assert over.forgets == () and over.starts == () and over.again_at_s is None


# -- leaving
def test_absence_ends_nothing() -> None:
    for todo in (
        decided(None, LIVES),
        decided(None, LIVES, wishes={}),
        decided(orders(("x", 2)), LIVES, wishes={}),
    ):
        assert (todo.asks, todo.kills, todo.starts) == ((), (), ())
        assert state(todo)[0] is UnitState.RUNNING


def test_a_present_order_without_it_or_a_stop_asks_it_once_to_leave() -> None:
    assert decided((), LIVES).asks == (AskUnitToLeave("x", "the node has other orders"),)
    assert decided((), LIVES, wishes={}).asks == (AskUnitToLeave("x", "the node has other orders"),)
    for given_orders in (orders(("x", 2)), None, ()):
        todo = decided(given_orders, LIVES, wishes={"x": Wish.STOP})
        assert todo.asks == (AskUnitToLeave("x", "the job is to stop"),)
        assert state(todo)[0] is UnitState.LEAVING
    asked = decided((), replace(LIVES, asked_since_s=NOW_S))
    assert asked.asks == () and state(asked)[0] is UnitState.LEAVING


def test_a_unit_of_a_job_that_is_over_ends_by_itself_while_it_is_ordered() -> None:
    over = {"x": Wish.OVER}
    assert decided(orders(("x", 2)), LIVES, wishes=over).asks == ()
    assert decided((), LIVES, wishes=over).asks == (AskUnitToLeave("x", "the node has other orders"),)


def test_who_does_not_leave_is_killed_once_and_told_of_if_that_does_not_help() -> None:
    asked = replace(LIVES, asked_since_s=NOW_S)
    wait_s = LIVES.shutdown_timeout_s + POLICY.kill_grace_s
    early = decided((), asked, now_s=NOW_S + wait_s - 0.1)
    assert early.kills == () and early.again_at_s == NOW_S + wait_s
    late = decided((), asked, now_s=NOW_S + wait_s)
    assert [k.job_id for k in late.kills] == ["x"] and "asked to leave 40 s ago" in late.kills[0].reason
    # called back meanwhile: it must have left before it can come again
    assert decided(orders(("x", 2)), asked, now_s=NOW_S + wait_s).kills
    killed = replace(asked, killed_since_s=NOW_S)
    waits = decided((), killed, now_s=NOW_S + 59.0)
    assert (waits.kills, waits.troubles, waits.again_at_s) == ((), (), NOW_S + 60.0)
    assert decided((), killed, now_s=NOW_S + 60.0).troubles == (
        "job x was killed and still has processes in slots 0, 1",
    )
    failed = replace(killed, act_again_s=NOW_S + 70.0)
    assert decided((), failed, now_s=NOW_S + 60.0).troubles == (
        "job x can't be killed, as the daemon's log says, and still has processes in slots 0, 1",
    )


# -- slots
@pytest.mark.parametrize(
    ("free", "count", "chosen"),
    [
        ({0, 1, 2, 3}, 2, (0, 1)),
        ({0, 1, 2, 5, 6}, 2, (5, 6)),
        ({0, 2, 4, 5}, 3, (0, 2, 4)),
        ({3}, 1, (3,)),
        ({0, 1}, 3, None),
    ],
)
def test_neighbours_in_the_shortest_run_that_is_long_enough(
    free: set[int], count: int, chosen: tuple[int, ...] | None
) -> None:
    assert choose(free, count) == chosen


UNITS = st.builds(
    OwnUnit,
    st.sampled_from("xyz"),
    st.booleans(),
    asked_since_s=st.sampled_from((None, 900.0, 999.0)),
    killed_since_s=st.sampled_from((None, 990.0)),
    act_again_s=st.sampled_from((None, 999.0, 1001.0)),
    ended_s=st.sampled_from((0.0, 995.0, 999.5)),
    failures=st.integers(0, 6),
    refused=st.booleans(),
)


@given(
    slots=st.integers(1, 6),
    units=st.lists(UNITS, max_size=3, unique_by=lambda u: u.job_id),
    ordered=st.none() | st.dictionaries(st.sampled_from("xyz"), st.integers(0, 7)),
    wishes=st.dictionaries(st.sampled_from("xyz"), st.sampled_from(Wish)),
)
def test_whatever_the_situation(
    slots: int, units: list[OwnUnit], ordered: dict[str, int] | None, wishes: dict[str, Wish]
) -> None:
    placed = []
    for place, unit in enumerate(units):
        placed.append(replace(unit, slots=(place,) if place < slots else ()) if unit.alive else unit)
    given_orders = None if ordered is None else orders(*ordered.items())
    todo = plan_units(UnitSituation(slots, given_orders, tuple(placed), wishes), NOW_S, POLICY)
    used = [s for u in placed if u.alive for s in u.slots] + [s for start in todo.starts for s in start.slots]
    assert len(used) == len(set(used)) and set(used) <= set(range(slots)), "a slot serves one job"
    for start in todo.starts:
        assert ordered is not None and len(start.slots) == ordered[start.job_id]
        assert wishes.get(start.job_id) is Wish.RUN
    again = {
        unit.job_id for unit in placed if unit.asked_since_s is not None and unit.act_again_s is not None
    }
    for ask in todo.asks:
        assert (
            ask.job_id in again
            or wishes.get(ask.job_id) is Wish.STOP
            or (ordered is not None and ask.job_id not in ordered)
        )
    touched = {a.job_id for a in todo.asks} | {k.job_id for k in todo.kills}
    assert touched <= {u.job_id for u in placed if u.alive}
    assert {u.job_id for u in placed if u.alive} == {v.job_id for v in todo.report if v.alive}
    assert todo.again_at_s is None or todo.again_at_s > NOW_S


# -- names that are used again
def test_a_unit_of_a_removed_job_makes_way_for_the_next_of_its_name() -> None:
    old = replace(LIVES, nonce="old")

    def plan_with(unit: OwnUnit, **nonces: str) -> UnitPlan:
        situation = UnitSituation(4, orders(("x", 2)), (unit,), RUN, nonces)
        return plan_units(situation, NOW_S, POLICY)

    [ask] = plan_with(old, x="new").asks
    assert ask.reason == "its job was removed, and another of its name was submitted"
    assert plan_with(old, x="old").asks == () and plan_with(old).asks == (), "its own, or unknown"
    assert plan_with(LIVES, x="new").asks == (), "one of an earlier version does not say whose it is"
    failed = replace(ENDED, nonce="old", failures=5)
    assert plan_with(failed, x="new").starts == (StartUnit("x", (0, 1), 1),), (
        "its failures are not the new job's"
    )
    assert plan_with(failed, x="old").starts == ()
