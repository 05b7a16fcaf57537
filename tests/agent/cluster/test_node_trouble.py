from __future__ import annotations

import pytest

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import NodeView, UnitState, UnitView
from bagua_agent.cluster.node_trouble import (
    failures_after,
    forgotten_at_s,
    is_lost,
    lost_at_s,
    settled_at_s,
    start_again_at_s,
    why_left_out,
)

POLICY = ClusterPolicy()


def test_a_node_is_lost_fifteen_seconds_after_it_was_first_missed() -> None:
    away = NodeView("a", 1, present=False, absent_since_s=100.0)
    assert lost_at_s(away, POLICY) == 115.0
    assert not is_lost(away, 114.9, POLICY) and is_lost(away, 115.0, POLICY)
    assert not is_lost(NodeView("a", 1, absent_since_s=0.0), 1e9, POLICY)


def test_delays_double_from_one_second_to_sixty() -> None:
    patient = ClusterPolicy(failures_before_left_out=100)
    delays = [start_again_at_s(10.0, failures, patient) for failures in (0, 1, 2, 3, 6, 7, 8, 99)]
    assert delays == [11.0, 11.0, 12.0, 14.0, 42.0, 70.0, 70.0, 70.0]
    assert [start_again_at_s(0.0, failures, POLICY) for failures in (4, 5)] == [8.0, None]
    assert forgotten_at_s(10.0, POLICY) == 610.0
    assert settled_at_s(10.0, POLICY) == 13.0


@pytest.mark.parametrize(
    ("before", "ran_s", "asked", "after"),
    [(0, 1.0, False, 1), (4, 59.9, False, 5), (4, 60.0, False, 1), (4, 1.0, True, 4)],
)
def test_failures_in_a_row(before: int, ran_s: float, asked: bool, after: int) -> None:
    assert failures_after(before, ran_s, asked, POLICY) == after


def test_left_out() -> None:
    def why(state: UnitState, failures: int, reason: str = "") -> str:
        return why_left_out(UnitView("x", state, failures=failures, reason=reason), POLICY)

    assert why(UnitState.ENDED, 4) == "" and why_left_out(None, POLICY) == ""
    assert why(UnitState.ENDED, 5) == "5 failures in a row"
    assert why(UnitState.WAITING, 6, "no GPU") == "6 failures in a row, the last: no GPU"
    assert why(UnitState.RUNNING, 9) == "" and why(UnitState.LEAVING, 9) == ""
    assert why(UnitState.REFUSED, 0) == "it can't be started there"
    assert why(UnitState.REFUSED, 0, "no such user") == "no such user"
