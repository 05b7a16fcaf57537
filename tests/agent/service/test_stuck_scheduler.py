"""A scheduler whose loop is stuck gives its key up, though its lease lives; another daemon schedules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from bagua_agent.cluster.cluster_plan import Plan
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import ClusterView
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.job.loop_watch import STUCK_AFTER_S, LoopWatch
from bagua_agent.job.loop_watch import TICK_S as LOOP_TICK_S
from bagua_agent.service.scheduling import scheduler as scheduling
from bagua_agent.service.scheduling.scheduler import Scheduler
from tests.agent.cluster_state.test_odd_records import node, ordered, submission
from tests.lab.wait import eventually

DEADLINE_S = 20.0
LEASE_S = 60.0
TICK_S = 0.02


@pytest.fixture
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "LoopWatch", partial(LoopWatch, tick_s=TICK_S))
    monkeypatch.setattr(scheduling, "TICK_S", TICK_S)


@pytest.fixture
def opened(plain_store: Store) -> Iterator[ExitStack]:
    plain_store.put(cluster_keys.node("n0"), node("n0"))
    with ExitStack() as opened:
        yield opened


def start(store: Store, name: str, said: list[str], opened: ExitStack) -> Scheduler:
    leased = LeasedKeys(store, LEASE_S)
    opened.callback(leased.close)
    scheduler = Scheduler(store, leased, name, said.append, ClusterPolicy(settle_s=0.0))
    opened.callback(scheduler.stop)
    scheduler.start()
    return scheduler


def test_another_daemon_schedules_while_ones_loop_is_stuck(
    quick_ticks: None, plain_store: Store, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, goes_on, is_stuck = scheduling.plan, threading.Event(), threading.Event()
    blocked: list[threading.Thread] = []

    def plan(view: ClusterView, now_s: float, policy: ClusterPolicy) -> Plan:
        if view.submissions and (not blocked or blocked[0] is threading.current_thread()):
            blocked[:] = [threading.current_thread()]
            is_stuck.set()
            goes_on.wait(DEADLINE_S)
        return real(view, now_s, policy)

    monkeypatch.setattr(scheduling, "plan", plan)
    said: list[str] = []
    first = start(plain_store, "n0", said, opened)
    opened.callback(goes_on.set)
    eventually(lambda: first.leads, DEADLINE_S, lambda: f"the first one leads: {said}")
    second_said: list[str] = []
    second = start(plain_store, "n1", second_said, opened)
    plain_store.put(cluster_keys.submission("job"), submission("job"))
    assert is_stuck.wait(DEADLINE_S)
    eventually(lambda: ordered(plain_store) == ["job"], DEADLINE_S, lambda: f"ordered; {said} {second_said}")
    assert second.leads and not first.leads
    assert [line for line in said if "the scheduler's loop has waited" in line]
    goes_on.set()
    eventually(lambda: "another node schedules now" in said, DEADLINE_S, lambda: f"it gives way: {said}")
    assert second.leads and ordered(plain_store) == ["job"]


def test_a_scheduler_that_only_waits_is_not_stuck(
    quick_ticks: None, plain_store: Store, opened: ExitStack
) -> None:
    said: list[str] = []
    scheduler = start(plain_store, "n0", said, opened)
    eventually(lambda: scheduler.leads, DEADLINE_S, lambda: f"it leads: {said}")
    before, turns = scheduler._watch._turns, 3 * round(STUCK_AFTER_S / LOOP_TICK_S)
    eventually(lambda: scheduler._watch._turns > before + turns, DEADLINE_S, "its loop turns without news")
    assert scheduler.leads and said == ["this node schedules the cluster's jobs"]
