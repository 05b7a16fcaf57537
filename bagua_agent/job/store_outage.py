"""Follows whether etcd answers: the lines and the history of an outage, and its length."""

from __future__ import annotations

from bagua_agent.history import job_history
from bagua_agent.job_state.context import JoinedJob


class StoreOutage:
    """Begins connected. count: of outages. leading: the leader's word is enough, so it writes both ends of an outage
    into the history."""

    def __init__(self) -> None:
        self.connected = True
        self._since_s = 0.0
        self.count = 0
        self._ended_s = 0.0  # of the outages that are over
        self._is_noted = False

    def away_for_s(self, now_s: float) -> float:
        return 0.0 if self.connected else now_s - self._since_s

    def total_s(self, now_s: float) -> float:
        """Of all outages, the present one included."""
        return self._ended_s + self.away_for_s(now_s)

    def changed(self, connected: bool, now_s: float, job: JoinedJob, *, leading: bool) -> None:
        if connected == self.connected:
            return
        away_s = now_s - self._since_s
        self.connected = connected
        self._since_s = now_s
        if connected:
            self._ended_s += away_s
            if self._is_noted:
                job.history.own(job_history.store_back(job.agent_id, self.count, away_s))
            job.narrator.tell("etcd answers again")
            job.leased.recheck()
        else:
            self.count += 1
            self._is_noted = leading
            if self._is_noted:
                job.history.own(job_history.store_away(job.agent_id, self.count))
            job.narrator.tell("etcd does not answer; training goes on, changes of membership wait")
