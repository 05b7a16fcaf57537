"""Decides which agents are probed, and what the answers mean.

A suspicion is only a reason to probe. A refused connection proves a death at once; silence does if neither the leader
nor another agent gets an answer within the probe window: a cut between two agents is no death. Sends no probes itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bagua_agent.membership.job_condition import JobCondition
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import Evidence, JobView, Probe, ProbeVerdict, SuspicionView

MOST_RELAYS = 16


@dataclass(frozen=True, slots=True)
class Inquiry:
    """The agents to probe, and those whose answers are awaited. With neither, all suspicions are settled.

    ask: agents to ask now. awaited: agents that were asked and have yet to answer. broken: some communicator is broken,
    so if all agents live the generation must be made anew. again_at_s: when unanswered probes are given up and sent
    again.
    """

    ask: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()
    broken: bool = False
    again_at_s: float | None = None

    @property
    def settled(self) -> bool:
        return not self.ask and not self.awaited


def inquire(
    view: JobView, condition: JobCondition, evidence: Evidence, now_s: float, policy: Policy
) -> Inquiry:
    """Returns the probes that the live suspicions call for."""
    if not condition.suspicions:
        return Inquiry()
    broken = [s for s in condition.suspicions if s.broken]
    everyone = agents_in_question(view, condition)
    first = all_accused(view, condition.suspicions, everyone)
    if broken:
        # From the first report on: the others report the same break a moment later.
        since_s = min(s.seen_since_s for s in broken)
    else:
        # Stalls are reported again and again: once per window is often enough to ask.
        since_s = max(s.seen_since_s for s in condition.suspicions) - policy.probe_window_s
    # Those named first, since that is few even in a large job. A transport may name the peer that merely gave
    # up first, so before a generation is made anew with the same members, all agents are probed.
    for circle in (first, everyone) if broken else (first,):
        inquiry = who_lives(view, evidence, circle, since_s, now_s, policy)
        if not inquiry.settled:
            return replace(inquiry, broken=bool(broken))
    return Inquiry(broken=bool(broken))


def who_lives(
    view: JobView, evidence: Evidence, agents: Iterable[str], since_s: float, now_s: float, policy: Policy
) -> Inquiry:
    """Returns which of these agents, there or gone, are not known to live since since_s and must be asked."""
    ask, awaited, again = [], [], []
    for agent_id in agents:
        if agent_id == evidence.observer_agent_id or evidence.is_dead(view.known_agent(agent_id)):
            continue
        if evidence.alive_agents.get(agent_id, float("-inf")) >= since_s:
            continue
        probe = evidence.probes.get(agent_id)
        # Twice the window: an answer that never came means that the question was lost.
        if probe is not None and now_s < probe.asked_at_s + 2 * policy.probe_window_s:
            awaited.append(agent_id)
            again.append(probe.asked_at_s + 2 * policy.probe_window_s)
        else:
            ask.append(agent_id)
    return Inquiry(tuple(ask), tuple(awaited), again_at_s=min(again, default=None))


def gathering_until_s(
    view: JobView, condition: JobCondition, evidence: Evidence, now_s: float, policy: Policy
) -> float | None:
    """Returns until when it is worth waiting for others that may be lost beside those known to be; None: no longer.
    Many are lost at once with a rack, and another generation for the rest would cost every member more than the wait:
    until all members have reported which others they miss, and until all agents that are probed by then have
    answered."""
    broken_s = min((s.broken_since_s for s in condition.suspicions if s.broken), default=None)
    members = 0 if view.generation is None else view.generation.world_size
    told_s = 0.0 if broken_s is None else broken_s + policy.gather_each_s * members
    asked_at_s = [
        evidence.probes[a].asked_at_s
        for a in all_accused(view, condition.suspicions, agents_in_question(view, condition))
        if a in evidence.probes and not evidence.is_dead(view.agents[a])
    ]
    answered_s = max(asked_at_s, default=0.0) + min(
        policy.probe_window_s, policy.answer_each_s * len(asked_at_s)
    )
    until_s = max(told_s, answered_s)
    return until_s if now_s < until_s else None


def all_accused(view: JobView, suspicions: Iterable[SuspicionView], everyone: Iterable[str]) -> list[str]:
    """Returns the agents that some suspicion names, sorted; all of the generation if a suspicion names none that is
    known."""
    agents = sorted(everyone)
    index = _Named(view, agents)
    found: set[str] = set()
    for hosts in {s.hosts for s in suspicions}:
        of_one = index.of(hosts)
        if not of_one:
            return agents
        found |= of_one
    return sorted(found)


def named(view: JobView, suspicion: SuspicionView, everyone: Iterable[str]) -> list[str]:
    """Returns those of `everyone` that a suspicion names, in their order."""
    agents = list(everyone)
    found = _Named(view, agents).of(suspicion.hosts)
    return [a for a in agents if a in found]


class _Named:
    """Maps hosts to the agents that they belong to: by the agent's name, its control address, or a store of one of its
    workers. Made once for many suspicions, as in a large job there is one from every member."""

    def __init__(self, view: JobView, everyone: Iterable[str]) -> None:
        self._agents: defaultdict[str, set[str]] = defaultdict(set)
        known = set(everyone)
        for agent_id in known:
            agent = view.agents[agent_id]
            self._agents[agent.node_name].add(agent_id)
            self._agents[_host(agent.control_address)].add(agent_id)
        for member in view.members.values():
            if member.agent_id in known:
                self._agents[_host(member.store_address)].add(member.agent_id)

    def of(self, hosts: Iterable[str]) -> set[str]:
        found: set[str] = set()
        for host in hosts:
            found |= self._agents.get(_host(host), set())
        return found


def relays_for(view: JobView, evidence: Evidence, asked: Sequence[str]) -> dict[str, str]:
    """Returns the agent that probes each of `asked` on the leader's behalf; empty if there is no other agent. Many
    probes are shared out, since one agent that sent all of them would itself fall silent."""
    unsure = set(asked)
    others = sorted(
        (
            a
            for a in view.agents.values()
            if a.agent_id != evidence.observer_agent_id and not evidence.is_dead(a)
        ),
        # one that is not itself in question, if there is one
        key=lambda a: (a.agent_id in unsure, a.join_revision),
    )
    sure = [a.agent_id for a in others[:MOST_RELAYS] if a.agent_id not in unsure]
    if sure:
        return {target: sure[place % len(sure)] for place, target in enumerate(asked)}
    return {target: next((a.agent_id for a in others if a.agent_id != target), "") for target in asked}


def judge_probe(probe: Probe, asker: str, relay_name: str = "") -> tuple[ProbeVerdict, str] | None:
    """Returns what the answers so far say, and how it is known; None: wait for the other answer.

    asker: how the agent that judges is called in what people read; relay_name: the one that asks for it, else its id.
    """
    relay = probe.relay_agent_id and (relay_name or probe.relay_agent_id)
    if probe.direct is ProbeVerdict.ALIVE:
        return ProbeVerdict.ALIVE, "answered"
    if probe.relayed is ProbeVerdict.ALIVE:
        return ProbeVerdict.ALIVE, f"answered {relay}, though not {asker}"
    if probe.direct is ProbeVerdict.REFUSED:
        return ProbeVerdict.REFUSED, "refused the connection"
    if probe.direct is None:
        return None
    if not relay:
        return ProbeVerdict.UNANSWERED, "did not answer"
    if probe.relayed is ProbeVerdict.REFUSED:
        return ProbeVerdict.REFUSED, f"did not answer, and refused {relay}"
    if probe.relayed is ProbeVerdict.UNANSWERED:
        return ProbeVerdict.UNANSWERED, f"answered neither {asker} nor {relay}"
    return None


def agents_in_question(view: JobView, condition: JobCondition) -> list[str]:
    """Returns the agents of the generations that may be in force, as far as they are there."""
    records = [g for g in (view.record(condition.in_force), view.generation) if g is not None]
    return sorted({m.agent_id for g in records for m in g.members if m.agent_id in view.agents})


def _host(address: str) -> str:
    """Returns the host of host, host:port or [host]:port."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address
