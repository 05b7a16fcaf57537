"""Is the leader itself what is missing? An agent whose worker is in trouble asks it, and removes a dead one's key.

Without this, losing the leader would cost a lease; with it, no more than losing anyone. A mistake is harmless: the
leader's writes are fenced by its key. What answers mean is membership/detection.py, for the leader as for anybody.
"""

from __future__ import annotations

from dataclasses import replace

from bagua_agent.leadership import Leadership, ProbeResult
from bagua_agent.membership.actions import Question
from bagua_agent.membership.detection import judge_probe
from bagua_agent.membership.view import Probe, Verdict
from bagua_agent.store_events import LeaderKey

_RELAY = "relay"


class LeaderWatch:
    def __init__(self, leadership: Leadership, own_agent_id: str, probe_window_s: float) -> None:
        self._leadership = leadership
        self._own_agent_id = own_agent_id
        self._ask_again_s = 2 * probe_window_s
        self._leader: LeaderKey | None = None
        self._sequence = 0
        self._asked_at_s = float("-inf")
        self._probe: Probe | None = None  # the question that is not settled yet

    def leader_is(self, leader: LeaderKey | None) -> None:
        """leader: another agent, or None while there is none or it is this one."""
        if leader != self._leader:
            self._leader = leader
            self._asked_at_s = float("-inf")
            self._probe = None

    def suspect(self, relay_address: str, now_s: float) -> None:
        """A worker here can't go on: make sure that the leader lives. relay_address: of a third agent, or empty."""
        leader = self._leader
        if leader is None or now_s - self._asked_at_s < self._ask_again_s:
            return
        self._asked_at_s = now_s
        # Negative, so that no answer is mistaken for one that the membership machine waits for.
        self._sequence -= 1
        relay = _RELAY if relay_address else ""
        self._probe = Probe(leader.agent_id, leader.create_revision, self._sequence, now_s, relay)
        self._leadership.ask(
            Question(leader.agent_id, leader.control_address, relay, relay_address), self._sequence
        )

    def took(self, result: ProbeResult) -> bool:
        """Whether `result` answers a question of ours; a confirmed death removes the leader's key."""
        if result.sequence >= 0:
            return False
        probe = self._probe
        if probe is None or result.sequence != probe.sequence or result.agent_id != probe.agent_id:
            return True
        heard = result.verdict
        probe = replace(probe, relayed=heard) if result.relayed else replace(probe, direct=heard)
        judged = judge_probe(probe)
        self._probe = probe if judged is None else None
        if judged is not None and judged[0] is not Verdict.ALIVE:
            self._leadership.remove_dead_leader(probe.join_revision)
        return True
