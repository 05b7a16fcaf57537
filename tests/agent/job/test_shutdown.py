"""What a node does between the end of its part in a job and its exit."""

from __future__ import annotations

import queue
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from bagua_agent.base.messages import HealthAsked, SignalCame, WorkerExited
from bagua_agent.job import shutdown
from bagua_agent.job.messages import StoreChanged
from bagua_agent.job.shutdown import FOLLOWERS_LEAVE_S, take_signals, wait_for_followers


def test_signals_that_come_while_workers_end_are_taken_and_changes_kept() -> None:
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    health, first, second = HealthAsked(), StoreChanged(()), StoreChanged(())
    for message in (
        first,
        SignalCame(signal.SIGINT),
        WorkerExited("w", 0),
        health,
        second,
        SignalCame(signal.SIGTERM),
    ):
        inbox.put(message)
    changes: list[StoreChanged] = []
    assert take_signals(inbox, changes) == [signal.SIGINT, signal.SIGTERM]
    assert len(changes) == 2 and changes[0] is first and changes[1] is second
    assert health.answered.is_set() and inbox.empty()


def test_the_host_of_etcd_outlasts_the_time_that_others_workers_have_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0

    def passes(timeout: float) -> object:
        nonlocal now_s
        now_s += timeout
        raise queue.Empty

    job: Any = SimpleNamespace(agent_id="a", seen=SimpleNamespace(view=SimpleNamespace(agents=["a", "b"])))
    inbox: Any = SimpleNamespace(get=passes)
    monkeypatch.setattr(shutdown, "time", SimpleNamespace(monotonic=lambda: now_s))
    wait_for_followers(job, inbox, lambda message, at_s: None, [], workers_end_within_s=300.0)
    assert now_s == pytest.approx(300.0 + FOLLOWERS_LEAVE_S, abs=1.0)
