"""The pace of a job comes from an agent with workers in the generation, not from one on standby or a silent one."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.etcd.client import KeyValue
from bagua_agent.observation import job_paces
from bagua_agent.observation.agent_calls import AgentSeen
from bagua_agent.observation.job_paces import (
    ASK_EVERY_S,
    BUDGET_S,
    MOST_PASSED_OVER,
    JobPace,
    JobPaces,
    pace_of,
)
from tests.agent.observation.facts import agent, worker

SILENT_S = 3.0  # that an agent without an answer takes
TRAINS, PACE = agent(1, worker(1, step=30, total_steps=100)), JobPace(30, 100, 2.0)
STANDBY = agent(0, worker(None, step=12, total_steps=100))
SILENT = agent(0, answers=False)


class Cluster:
    """The agents of one job, by the value of their key, and a clock that a silent one advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *agents: AgentSeen) -> None:
        self.now_s, self.asked, self.may_read = 0.0, 0, True
        self._agents = agents
        monkeypatch.setattr(job_paces, "JobAgents", lambda store, job_id: self)
        self._paces = JobPaces(cast(Any, None), lambda: self.now_s)

    def look(self, records: list[KeyValue]) -> tuple[AgentSeen, ...]:
        if not self.may_read:
            raise UserError("no key pair")
        found = tuple(self._agents[int(record.value)] for record in records)
        self.asked += len(found)
        self.now_s += SILENT_S * sum(seen.is_silent for seen in found)
        return found

    def close(self) -> None:
        """Ends nothing."""

    def round(self) -> dict[str, JobPace]:
        self.now_s += ASK_EVERY_S
        keys = [KeyValue(f"agents/{n}", b"%d" % n, 1, 1) for n in range(len(self._agents))]
        return self._paces.look({"demo": keys})


def test_the_last_report_of_a_worker_on_standby_is_no_pace() -> None:
    assert STANDBY.node is not None and TRAINS.node is not None
    assert pace_of(STANDBY.node) is None
    assert pace_of(TRAINS.node) == PACE


def test_an_agent_on_standby_is_passed_over_at_once_and_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, STANDBY, TRAINS)
    assert cluster.round() == {"demo": PACE}
    assert cluster.asked == 2
    assert cluster.round() == {"demo": PACE}
    assert cluster.asked == 3


def test_a_silent_agent_is_passed_over_by_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SILENT_S > BUDGET_S
    cluster = Cluster(monkeypatch, SILENT, TRAINS)
    assert cluster.round() == {}
    assert cluster.round() == {"demo": PACE}


def test_a_job_without_a_pace_takes_a_few_calls_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, *[STANDBY] * 9, TRAINS)
    assert cluster.round() == {}
    assert cluster.asked == MOST_PASSED_OVER
    assert [cluster.round() for _ in range(2)][-1] == {"demo": PACE}


def test_without_the_right_to_the_key_pair_there_is_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, TRAINS)
    cluster.may_read = False
    assert cluster.round() == {}
