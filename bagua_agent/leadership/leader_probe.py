"""Probes the leader for an agent whose worker can't go on, and reports a dead one.

Without this, the loss of the leader would cost a lease; with it, it costs the same as the loss of any other node.
membership/failures/detection.py interprets the answers, as for any agent. Does not remove keys: reports the death once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bagua_agent.job_state.decode import LeaderKey
from bagua_agent.leadership.probes import Probes
from bagua_agent.leadership.reports import ProbeResult
from bagua_agent.membership.actions import Question
from bagua_agent.membership.failures.detection import judge_probe
from bagua_agent.membership.view import Probe, ProbeVerdict

_RELAY = "a third agent"


@dataclass(frozen=True, slots=True)
class DeadLeader:
    """A leader whose death was confirmed, by its keys at the time of the probe.

    create_revision: of control/leader. agent_revision: of its agent key; 0 if this agent does not see that key. how: it
    is known.
    """

    agent_id: str
    create_revision: int
    agent_revision: int
    how: str


class LeaderWatch:
    """Probes a leader in doubt. on_death(leader) is called for each confirmed death."""

    def __init__(self, probes: Probes, probe_window_s: float, on_death: Callable[[DeadLeader], None]) -> None:
        self._probes = probes
        self._ask_again_s = 2 * probe_window_s
        self._on_death = on_death
        self._leader: LeaderKey | None = None
        self._sequence = 0
        self._asked_at_s = float("-inf")
        self._probe: Probe | None = None  # the question that is not settled yet
        self._agent_revision = 0  # of the agent key, when that was asked

    def leader_is(self, leader: LeaderKey | None) -> None:
        """Sets the leader to watch. leader: another agent, or None while there is none or it is this one."""
        if leader != self._leader:
            self._leader = leader
            self._asked_at_s = float("-inf")
            self._probe = None

    def suspect(self, relay_address: str, agent_revision: int, now_s: float) -> None:
        """Makes sure that the leader lives, since a worker here can't go on. relay_address: of a third agent, or empty.
        agent_revision: create revision of the leader's agent key, or 0."""
        leader = self._leader
        if leader is None or now_s - self._asked_at_s < self._ask_again_s:
            return
        self._asked_at_s = now_s
        # Negative, so that no answer is mistaken for one that the membership machine waits for.
        self._sequence -= 1
        relay = _RELAY if relay_address else ""
        self._probe = Probe(leader.agent_id, leader.create_revision, self._sequence, now_s, relay)
        self._agent_revision = agent_revision
        self._probes.ask(
            Question(leader.agent_id, leader.control_address, relay, relay_address), self._sequence
        )

    @property
    def leader_id(self) -> str:
        """The agent that would be asked; empty if there is none."""
        return "" if self._leader is None else self._leader.agent_id

    @property
    def addresses(self) -> dict[str, str]:
        """The control address of that agent, by its id."""
        return {} if self._leader is None else {self._leader.agent_id: self._leader.control_address}

    def took(self, result: ProbeResult, now_s: float) -> bool:
        """Takes an answer and returns whether it is of a probe of ours. Silence that is reported later than twice the
        window proves nothing: this agent itself may have been frozen while the answers came."""
        if result.sequence >= 0:
            return False
        probe = self._probe
        if probe is None or result.sequence != probe.sequence or result.agent_id != probe.agent_id:
            return True
        heard = result.verdict
        probe = replace(probe, relayed=heard) if result.relayed else replace(probe, direct=heard)
        judged = judge_probe(probe, "this agent")
        self._probe = probe if judged is None else None
        if judged is None or judged[0] is ProbeVerdict.ALIVE:
            return True
        if judged[0] is ProbeVerdict.REFUSED or now_s - probe.asked_at_s <= self._ask_again_s:
            self._on_death(DeadLeader(probe.agent_id, probe.join_revision, self._agent_revision, judged[1]))
        return True
