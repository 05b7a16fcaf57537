"""Asks an agent of each running job how far its job is, and at which speed it trains.

Agents are asked one after the other and within a budget of time, the jobs that were asked longest ago first, so that a
silent agent delays neither the others nor the page for long. An agent that is silent or on standby is passed over: the
next one of its job is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from bagua_agent.base.errors import UserError
from bagua_agent.etcd.client import KeyValue, Store
from bagua_agent.observation.agent_calls import JobAgents
from bagua_contract import control_pb2

# of one round; an agent that does not answer may take CALL_TIMEOUT_S of agent_calls.py beyond it
BUDGET_S = 2.0
ASK_EVERY_S = 5.0
MOST_JOBS = 32  # others show no progress
MOST_PASSED_OVER = 4  # agents of a job in a round


@dataclass(frozen=True, slots=True)
class JobPace:
    """The progress and speed of a job. total_steps: 0 if it is not known. steps_per_s: of the last report; 0 before the
    first step."""

    step: int
    total_steps: int
    steps_per_s: float

    @property
    def left_s(self) -> float | None:
        """The time until the last step, in seconds; None where the total or the rate is unknown."""
        if not self.total_steps or self.steps_per_s <= 0:
            return None
        return max(0, self.total_steps - self.step) / self.steps_per_s


def pace_of(node: control_pb2.ReadNodeReply) -> JobPace | None:
    """Returns the pace of the worker that is furthest; None before the first report, and where all workers are on
    standby, whose last reports stay as they were. Pure."""
    reports = [w.progress for w in node.workers if w.HasField("progress") and w.HasField("global_rank")]
    if not reports:
        return None
    newest = max(reports, key=lambda report: report.step)
    return JobPace(newest.step, newest.total_steps, newest.steps_per_s)


class JobPaces:
    """Asks the jobs for their paces. For one thread; `close` ends its connections."""

    def __init__(self, store: Store, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock_s = clock_s
        self._agents: dict[str, JobAgents] = {}
        self._asked_s: dict[str, float] = {}
        self._places: dict[str, int] = {}  # by job: which of its agents is asked
        self._paces: dict[str, JobPace] = {}

    def look(self, agents: Mapping[str, Iterable[KeyValue]]) -> dict[str, JobPace]:
        """Returns the paces by job. agents: the keys below `agents/` of each running job. Raises StoreUnavailable."""
        jobs = sorted(agents)[:MOST_JOBS]
        for job_id in self._agents.keys() - set(jobs):
            self._agents.pop(job_id).close()
            self._asked_s.pop(job_id, None)
            self._places.pop(job_id, None)
            self._paces.pop(job_id, None)
        began_s = self._clock_s()
        for job_id in sorted(jobs, key=lambda job_id: self._asked_s.get(job_id, float("-inf"))):
            now_s = self._clock_s()
            if now_s - began_s >= BUDGET_S or now_s - self._asked_s.get(job_id, float("-inf")) < ASK_EVERY_S:
                break  # the others were asked later still
            self._asked_s[job_id] = now_s
            self._ask(job_id, list(agents[job_id]), began_s + BUDGET_S)
        return dict(self._paces)

    def _ask(self, job_id: str, records: list[KeyValue], until_s: float) -> None:
        if job_id not in self._agents:
            self._agents[job_id] = JobAgents(self._store, job_id)
        self._paces.pop(job_id, None)
        for _ in records[:MOST_PASSED_OVER]:
            place = self._places.get(job_id, 0) % len(records)
            try:
                seen = self._agents[job_id].look([records[place]])
            except UserError:
                return  # without the right to the job's key pair its progress is unknown
            pace = next((pace_of(agent.node) for agent in seen if agent.node is not None), None)
            if pace is not None:
                self._paces[job_id] = pace
                return
            self._places[job_id] = place + 1
            if self._clock_s() >= until_s:
                return

    def close(self) -> None:
        for agents in self._agents.values():
            agents.close()
        self._agents.clear()
