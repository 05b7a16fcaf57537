"""Who must be asked whether it lives, and what the answers mean.

A suspicion is only a reason to ask. A refused connection is a death at once; silence is one if neither the
leader nor another agent gets an answer within the probe window: a cut between two agents is no death.
Does not ask: says whom to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bagua_agent.membership.policy import Policy
from bagua_agent.membership.standing import Standing
from bagua_agent.membership.view import Evidence, JobView, Probe, SuspicionView, Verdict


@dataclass(frozen=True, slots=True)
class Inquiry:
    """ask: agents to ask now. awaited: agents that were asked and have yet to answer.

    With neither, all suspicions are looked into. broken: some communicator is broken, so if everybody lives
    the generation must be made anew. again_at_s: when unanswered questions are given up and asked again.
    """

    ask: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()
    broken: bool = False
    again_at_s: float | None = None

    @property
    def settled(self) -> bool:
        return not self.ask and not self.awaited


def inquire(view: JobView, standing: Standing, evidence: Evidence, now_s: float, policy: Policy) -> Inquiry:
    """What the live suspicions ask for."""
    if not standing.suspicions:
        return Inquiry()
    broken = [s for s in standing.suspicions if s.broken]
    everyone = agents_in_question(view, standing)
    first = sorted({a for s in standing.suspicions for a in accused(view, s, everyone)})
    if broken:
        # From the first report on: the others report the same break a moment later.
        since_s = min(s.seen_since_s for s in broken)
    else:
        # Stalls are reported again and again: once per window is often enough to ask.
        since_s = max(s.seen_since_s for s in standing.suspicions) - policy.probe_window_s
    # Those named first, since that is few even in a large job. A transport may name the peer that merely gave
    # up first, so before a generation is made anew with the same members everybody is asked.
    for circle in (first, everyone) if broken else (first,):
        inquiry = who_lives(view, evidence, circle, since_s, now_s, policy)
        if not inquiry.settled:
            return replace(inquiry, broken=bool(broken))
    return Inquiry(broken=bool(broken))


def who_lives(
    view: JobView, evidence: Evidence, agents: Iterable[str], since_s: float, now_s: float, policy: Policy
) -> Inquiry:
    """Which of these agents, all of them in the picture, are not known to live since since_s and must be asked."""
    ask, awaited, again = [], [], []
    for agent_id in agents:
        if agent_id == evidence.observer_agent_id or evidence.is_dead(view.agents[agent_id]):
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


def accused(view: JobView, suspicion: SuspicionView, everyone: Iterable[str]) -> list[str]:
    """Agents that a suspicion names; all of the generation if it names none that we know."""
    return named(view, suspicion, everyone) or list(everyone)


def named(view: JobView, suspicion: SuspicionView, everyone: Iterable[str]) -> list[str]:
    """Those of `everyone` that a suspicion names."""
    hosts = {_host(h) for h in suspicion.hosts}
    stores = {m.agent_id for m in view.members.values() if _host(m.store_address) in hosts}
    return [
        a
        for a in everyone
        if a in stores or view.agents[a].node_name in hosts or _host(view.agents[a].control_address) in hosts
    ]


def relay_for(view: JobView, evidence: Evidence, target: str, asked: Iterable[str]) -> str:
    """Who asks `target` on the leader's behalf; empty if there is nobody else."""
    unsure = set(asked)
    others = [
        a
        for a in view.agents.values()
        if a.agent_id not in (target, evidence.observer_agent_id) and not evidence.is_dead(a)
    ]
    # one that is not itself in question, if there is one
    best = min(others, key=lambda a: (a.agent_id in unsure, a.join_revision), default=None)
    return "" if best is None else best.agent_id


def judge_probe(probe: Probe) -> tuple[Verdict, str] | None:
    """What the answers so far say, and how it is known; None: wait for the other answer."""
    relay = probe.relay_agent_id
    if probe.direct is Verdict.ALIVE:
        return Verdict.ALIVE, "answered"
    if probe.relayed is Verdict.ALIVE:
        return Verdict.ALIVE, f"answered {relay}, though not us"
    if probe.direct is Verdict.REFUSED:
        return Verdict.REFUSED, "refused the connection"
    if probe.direct is None:
        return None
    if not relay:
        return Verdict.UNANSWERED, "did not answer"
    if probe.relayed is Verdict.REFUSED:
        return Verdict.REFUSED, f"did not answer, and refused {relay}"
    if probe.relayed is Verdict.UNANSWERED:
        return Verdict.UNANSWERED, f"answered neither us nor {relay}"
    return None


def agents_in_question(view: JobView, standing: Standing) -> list[str]:
    """Agents of the generations that may be in force, as far as they are there."""
    records = [g for g in (view.record(standing.in_force), view.generation) if g is not None]
    return sorted({m.agent_id for g in records for m in g.members if m.agent_id in view.agents})


def _host(address: str) -> str:
    """The host of host, host:port or [host]:port."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address
