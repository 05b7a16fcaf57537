"""How an event changes the picture. Knows no rule: what a change calls for is decided elsewhere.

Stale and repeated events are ordinary and ignored with a reason; what cannot be raises IllegalEvent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from bagua_agent.membership import events as ev
from bagua_agent.membership.detection import judge_probe
from bagua_agent.membership.standing import in_force
from bagua_agent.membership.view import (
    AgentView,
    DeadAgent,
    Desired,
    Evidence,
    FailureView,
    JobView,
    MemberView,
    SuspicionView,
    Verdict,
)
from bagua_contract.records import Generation

V = TypeVar("V")


class IllegalEvent(ValueError):
    """Contradicts what is known in a way that neither delay nor loss explains."""


def absorb(
    view: JobView, evidence: Evidence, event: ev.Event, next_sequence: int
) -> tuple[JobView, Evidence, str]:
    """The picture that knows of `event`; the string says why it was ignored, if it was.

    next_sequence: no question with this sequence or a later one was asked so far.
    """
    match event:
        case ev.GenerationSeen():
            view, note = _generation(view, event.generation)
            return view, evidence, note
        case ev.AgentGone():
            # what was learned of it was about the key that is gone
            evidence = replace(
                evidence,
                dead_agents=_without(evidence.dead_agents, event.agent_id),
                alive_agents=_without(evidence.alive_agents, event.agent_id),
                probes=_without(evidence.probes, event.agent_id),
            )
            return replace(view, agents=_without(view.agents, event.agent_id)), evidence, ""
        case ev.ProbeAnswered():
            evidence, note = _answer(view, evidence, event, next_sequence)
            return view, evidence, note
        case _:
            return _key(view, event), evidence, ""


def _key(view: JobView, event: ev.Event) -> JobView:
    match event:
        case ev.AgentSeen():
            agent = AgentView(
                agent_id=event.agent_id,
                node_name=event.node_name,
                slots=event.slots,
                topology=event.topology,
                leaving=event.leaving,
                control_address=event.control_address,
                join_revision=event.join_revision,
            )
            return replace(view, agents=_with(view.agents, agent.agent_id, agent))
        case ev.MemberReady():
            members = _with(view.members, event.worker_id, _member(view, event))
            if event.committed_generation <= view.committed_generation:
                return replace(view, members=members)
            return _forget(replace(view, members=members, committed_generation=event.committed_generation))
        case ev.MemberGone():
            return replace(view, members=_without(view.members, event.worker_id))
        case ev.MemberRefused():
            return replace(view, refused=view.refused | {event.worker_id})
        case ev.SuspicionRaised():
            return replace(view, suspicions=_with(view.suspicions, event.worker_id, _suspicion(view, event)))
        case ev.SuspicionCleared():
            return replace(view, suspicions=_without(view.suspicions, event.worker_id))
        case ev.FailureRecorded():
            failure = FailureView(
                worker_id=event.worker_id,
                node_name=event.node_name,
                step=event.step,
                in_step=event.in_step,
                script_failure=event.script_failure,
                summary=event.summary,
                order=event.order,
            )
            return replace(view, failures=_with(view.failures, event.worker_id, failure))
        case ev.WorkerFinished():
            return replace(view, finished=view.finished | {event.worker_id})
        case ev.DesiredChanged():
            return replace(view, desired=Desired(event.min_nodes, event.max_nodes))
        case ev.ClosingSeen():
            return replace(view, closing_generation=event.generation)
        case _:
            raise IllegalEvent(f"no picture changes by {type(event).__name__}")


def _member(view: JobView, event: ev.MemberReady) -> MemberView:
    known = view.members.get(event.worker_id)
    same = known is not None and known.join_revision == event.join_revision
    return MemberView(
        worker_id=event.worker_id,
        agent_id=event.agent_id,
        slot=event.slot,
        store_address=event.store_address,
        fingerprint=event.fingerprint,
        committed_generation=event.committed_generation,
        join_revision=event.join_revision,
        ready_since_s=known.ready_since_s if known is not None and same else event.now_s,
    )


def _suspicion(view: JobView, event: ev.SuspicionRaised) -> SuspicionView:
    known = view.suspicions.get(event.worker_id)
    same = known is not None and known.generation == event.generation and known.sequence == event.sequence
    return SuspicionView(
        worker_id=event.worker_id,
        generation=event.generation,
        broken=event.broken,
        hosts=event.hosts,
        sequence=event.sequence,
        seen_since_s=known.seen_since_s if known is not None and same else event.now_s,
    )


def _generation(view: JobView, generation: Generation) -> tuple[JobView, str]:
    known = view.generation
    if known is not None and generation.number < known.number:
        return view, f"ignored: generation {generation.number} is older than {known.number}"
    if known is not None and generation.number == known.number:
        if generation != known:
            raise IllegalEvent(f"two different generations of number {generation.number}")
        return view, f"ignored: generation {generation.number} is known"
    earlier = view.earlier if known is None else (*view.earlier, known)
    return _forget(replace(view, generation=generation, earlier=earlier)), ""


def _forget(view: JobView) -> JobView:
    """Drop the records that can neither be in force nor say who holds the state."""
    record = view.generation
    if record is None or not view.earlier:
        return view
    needed = in_force(view, record) if record.members else record.base
    return replace(view, earlier=tuple(g for g in view.earlier if g.number >= needed))


def _answer(
    view: JobView, evidence: Evidence, event: ev.ProbeAnswered, next_sequence: int
) -> tuple[Evidence, str]:
    if event.sequence >= next_sequence:
        raise IllegalEvent(f"an answer to question {event.sequence}, which was never asked")
    probe = evidence.probes.get(event.agent_id)
    if probe is None or probe.sequence != event.sequence:
        return evidence, f"ignored: {event.agent_id} answered question {event.sequence}, which is settled"
    probe = replace(probe, relayed=event.verdict) if event.relayed else replace(probe, direct=event.verdict)
    judged = judge_probe(probe)
    if judged is None:
        return replace(evidence, probes=_with(evidence.probes, probe.agent_id, probe)), ""
    verdict, how = judged
    evidence = replace(evidence, probes=_without(evidence.probes, probe.agent_id))
    if verdict is Verdict.ALIVE:
        alive = _with(evidence.alive_agents, probe.agent_id, probe.asked_at_s)
        if event.workers is None:
            return replace(evidence, alive_agents=alive), ""
        ended = {
            m.worker_id
            for m in view.members.values()
            # one that became ready after the question may be younger than the answer
            if m.agent_id == probe.agent_id
            and m.ready_since_s <= probe.asked_at_s
            and m.worker_id not in event.workers
        }
        return replace(evidence, alive_agents=alive, dead_workers=evidence.dead_workers | ended), ""
    dead = DeadAgent(probe.agent_id, probe.join_revision, event.now_s, how)
    return replace(evidence, dead_agents=_with(evidence.dead_agents, probe.agent_id, dead)), ""


def _with(mapping: Mapping[str, V], key: str, value: V) -> Mapping[str, V]:
    return {**mapping, key: value}


def _without(mapping: Mapping[str, V], key: str) -> Mapping[str, V]:
    return {k: v for k, v in mapping.items() if k != key}
