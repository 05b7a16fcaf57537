"""The ended jobs, removals and revisions that are kept: by number, by age, with clock jumps and a store that forgot."""

from __future__ import annotations

import pytest

from bagua_agent.cluster.cluster_policy import DAY_S, ClusterPolicy
from bagua_agent.cluster.cluster_view import RemovalView
from bagua_agent.cluster.retention import (
    EndedJob,
    HistoryKept,
    UnusedOrders,
    beyond_retention,
    expired_removals,
    is_worth_putting_back,
)

NOW_S = 1_000 * DAY_S
POLICY = ClusterPolicy(ended_kept_jobs=2)


def ended(name: str, days_ago: float) -> EndedJob:
    return EndedJob(name, f"nonce-{name}", NOW_S - days_ago * DAY_S)


def removed(*jobs: EndedJob, policy: ClusterPolicy = POLICY) -> list[str]:
    return [f"{each.job.job_id}: {each.reason}" for each in beyond_retention(jobs, NOW_S, policy)]


def test_the_newest_are_kept_and_the_longest_ended_go_first() -> None:
    jobs = [ended(name, days) for name, days in (("a", 4), ("b", 1), ("c", 3), ("d", 2))]
    assert removed(*jobs) == ["a: 2 jobs have ended since", "c: 2 jobs have ended since"]
    assert removed(*jobs[:2]) == []


def test_what_is_too_old_goes_however_few_there_are() -> None:
    assert removed(ended("old", 30.1), ended("young", 29.9)) == ["old: it ended more than 30 days ago"]


def test_one_that_does_not_say_when_it_ended_goes_by_number_alone() -> None:
    unknown = EndedJob("unknown", "n", 0.0)
    assert removed(unknown, ended("a", 1)) == []
    assert removed(unknown, ended("a", 1), ended("b", 2)) == ["unknown: 2 jobs have ended since"]


def test_one_that_ended_in_the_future_is_not_old() -> None:
    assert removed(ended("ahead", -5)) == []


def test_nothing_may_be_kept() -> None:
    assert removed(ended("a", 0), policy=ClusterPolicy(ended_kept_jobs=0)) == ["a: 0 jobs have ended since"]


def test_removals_stand_longer_than_anybody_puts_back_what_was_removed() -> None:
    removals = {f"d{days}": RemovalView("job", NOW_S - days * DAY_S) for days in (1, 2, 3, 4)}
    assert expired_removals(removals, NOW_S, POLICY) == ["d4"]
    worth = [nonce for nonce, each in removals.items() if is_worth_putting_back(each, NOW_S, POLICY)]
    assert worth == ["d1", "d2"], (
        "one at the end of its time is not put back by a clock that is a little behind"
    )
    with pytest.raises(ValueError, match="would come back"):
        ClusterPolicy(put_back_within_s=4 * DAY_S)


def test_history_is_compacted_to_what_is_old_enough() -> None:
    history = HistoryKept(ClusterPolicy(history_kept_s=600.0))
    assert [history.compact_to(300.0 * n, 100 * n) for n in range(5)] == [None, None, 0, 100, 200]


def test_a_store_that_counts_anew_is_not_compacted_beyond_itself() -> None:
    history = HistoryKept(ClusterPolicy(history_kept_s=600.0))
    history.compact_to(0.0, 5000)
    assert history.compact_to(600.0, 3) is None
    assert history.compact_to(1200.0, 7) == 3


def test_empty_orders_of_a_node_that_does_not_come_back_go_after_days() -> None:
    unused, kept_s = UnusedOrders(POLICY), POLICY.orders_kept_s
    assert kept_s >= POLICY.put_back_within_s, "no daemon that comes back later writes its old orders"
    assert unused.expired([("a", 7), ("b", 8)], 100.0) == []
    assert unused.expired([("a", 7), ("b", 8), ("c", 9)], 99.0 + kept_s) == []
    assert unused.expired([("a", 7), ("c", 9)], 100.0 + kept_s) == [("a", 7)]
    assert unused.expired([("a", 7), ("b", 8)], 101.0 + kept_s) == [("a", 7)], "b came back in between"
    assert unused.expired([("a", 11)], 102.0 + kept_s) == [], "it was written again"
