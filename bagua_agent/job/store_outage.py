"""Follows whether etcd answers: the lines and the history of an outage, and its length.

Steps need no etcd, but the generation after a loss does: the lines tell an outage in which training goes on from one in
which it waits. An etcd that sends changes may still not take this node's keys, as one with a slow disk; this too is
reported.
"""

from __future__ import annotations

from bagua_agent.history import job_history
from bagua_agent.job_state.context import JoinedJob

AWAY = "etcd does not answer; training goes on unless a worker is lost, changes of membership wait"
STUCK = (
    "etcd does not answer, and the workers here can't go on without a new generation: no step follows here until it "
    "answers. Check whether this host is cut off; if the host of etcd is lost, end the job on all nodes and start it "
    "again"
)
KEYS_AWAY_AFTER_S = 5.0  # longer than fail-over to another endpoint takes
KEYS_BACK = "etcd takes this node's keys again"

_TIMER = "keys away"


def keys_away(reason: str) -> str:
    return f"etcd does not take this node's keys, so the node may count as lost; it is tried again. {reason}"


def keeping_ended(reason: str) -> str:
    return (
        "this agent can't keep its keys in etcd any more, so the node counts as lost once its lease has ended; start "
        f"it again. {reason}"
    )


class StoreOutage:
    """Follows the outages of etcd; begins connected. count: of outages. leading: the leader's word is enough, so it
    writes both ends of an outage into the history."""

    def __init__(self) -> None:
        self.connected = True
        self._since_s = 0.0
        self.count = 0
        self._ended_s = 0.0  # of the outages that are over
        self._is_noted = False
        self._waits = False  # workers here take no step before another generation
        self._told_stuck = False  # in this outage
        self._told_keys_away = False

    def away_for_s(self, now_s: float) -> float:
        return 0.0 if self.connected else now_s - self._since_s

    def total_s(self, now_s: float) -> float:
        """Returns the length of all outages, the present one included."""
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
            job.terminal.tell("etcd answers again")
            job.leased.recheck()
        else:
            self.count += 1
            self._is_noted = leading
            if self._is_noted:
                job.history.own(job_history.store_away(job.agent_id, self.count))
            self._told_stuck = False
            if self._waits:
                self._tell_stuck(job)
            else:
                job.terminal.tell(AWAY)

    def follow_steps(self, job: JoinedJob, *, awaits_generation: bool) -> None:
        """Notes whether workers here wait for a generation, as WorkerLifecycle.awaits_generation; often called with
        the same value."""
        self._waits = awaits_generation
        if awaits_generation and not self.connected:
            self._tell_stuck(job)

    def keys_away(self, reason: str, now_s: float, job: JoinedJob) -> None:
        """Notes that this node's leased keys can't be kept up; told if that lasts while etcd answers."""
        job.timers.set(
            _TIMER, now_s + KEYS_AWAY_AFTER_S, lambda due_s: self._tell_keys_away(reason, due_s, job)
        )

    def keys_back(self, job: JoinedJob) -> None:
        job.timers.cancel(_TIMER)
        if self._told_keys_away:
            self._told_keys_away = False
            job.terminal.tell(KEYS_BACK)

    def keeping_ended(self, reason: str, job: JoinedJob) -> None:
        """Notes that this node's leased keys are kept up no more, and that nothing tries it again."""
        job.timers.cancel(_TIMER)
        job.terminal.tell(keeping_ended(reason))

    def _tell_keys_away(self, reason: str, now_s: float, job: JoinedJob) -> None:
        if not self.connected:  # that was told
            self.keys_away(reason, now_s, job)
            return
        self._told_keys_away = True
        job.terminal.tell(keys_away(reason))

    def _tell_stuck(self, job: JoinedJob) -> None:
        if not self._told_stuck:
            self._told_stuck = True
            job.terminal.tell(STUCK)
