"""Keeps the newest data of a job's page.

An agent looks also while no browser asks, so that its page has a past when it is opened. While etcd is away the agents
are asked alone; the rest stays as it was, with a note.
"""

from __future__ import annotations

from bagua_agent.base.errors import BaguaError
from bagua_agent.dashboard.page_data import Page, page_data
from bagua_agent.dashboard.page_loop import PageLoop
from bagua_agent.etcd.client import Store
from bagua_agent.observation.agent_calls import AgentSeen, JobAgents
from bagua_agent.observation.collectives import text_of
from bagua_agent.observation.job_collectives import read_collectives
from bagua_agent.observation.job_facts import JobFacts, facts_without_store, read_facts
from bagua_agent.observation.series import JobSeries

LOOK_UNWATCHED_S = 5.0

_NOTHING: Page = {"problem": "this agent has not joined its job yet"}


class Collector:
    """Collects the data of a job's page. It runs between construction and `stop`. store: the caller closes it after
    `stop`. served_by: see page_data. nothing, unwatched_s: see PageLoop."""

    def __init__(
        self,
        store: Store,
        job_id: str,
        served_by: str = "",
        nothing: Page = _NOTHING,
        unwatched_s: float | None = LOOK_UNWATCHED_S,
    ) -> None:
        self._store = store
        self._job_id = job_id
        self._served_by = served_by
        self.agents = JobAgents(store, job_id)
        self._facts: JobFacts | None = None
        self._series = JobSeries()
        self.loop = PageLoop(self._look, nothing, unwatched_s)

    def page(self) -> bytes:
        """Returns the newest data, as JSON."""
        return self.loop.page()

    def agent(self, agent_id: str) -> AgentSeen | None:
        """Returns an agent as the last look saw it; None if it did not."""
        facts = self._facts
        return next((a for a in facts.agents if a.agent_id == agent_id), None) if facts is not None else None

    def collectives(self, agent_id: str, slot: int) -> str:
        """Returns, as text, what all workers of the last look have under way; that slot's worker comes first."""
        facts = self._facts
        if facts is None:
            return ""
        workers = [w for a, w in facts.workers if (a.agent_id, w.slot) == (agent_id, slot)]
        first = next((w.global_rank for w in workers if w.HasField("global_rank")), None)
        return text_of(read_collectives(self.agents, facts), first)

    def stop(self, *, shows_end: bool = False) -> None:
        """Stops the collector. shows_end: see PageLoop."""
        self.loop.stop(shows_end=shows_end)
        self.agents.close()

    def _look(self) -> Page | str:
        try:
            facts = read_facts(self._store, self.agents, self._job_id)
        except BaguaError as error:
            return self._look_without_store(str(error))
        if facts is None:
            return f"etcd has no job {self._job_id!r}"
        return self._taken(facts, facts.problem)

    def _look_without_store(self, error: str) -> Page | str:
        if self._facts is None:
            return f"etcd does not answer: {error}"
        note = f"{error}; generations, failures and events are shown as they were"
        return self._taken(facts_without_store(self._facts, self.agents, error), note)

    def _taken(self, facts: JobFacts, problem: str) -> Page:
        self._series.take(facts)
        self._facts = facts
        return {**page_data(facts, self._series, self._served_by), "problem": problem}
