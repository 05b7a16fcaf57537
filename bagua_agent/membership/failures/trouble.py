"""Finds the exclusion options of a generation that does not work: some of its survivors, or of its joiners.

Reads from the picture what exclusion.py decides on.
"""

from __future__ import annotations

from collections.abc import Iterable

from bagua_agent.membership.exclusion import ExclusionOption, SuspectNode, exclusion_options
from bagua_agent.membership.failures.detection import named
from bagua_agent.membership.job_condition import JobCondition
from bagua_agent.membership.view import Evidence, JobView, SuspicionView
from bagua_contract.records import Placement, SuspicionKind


def of_survivors(view: JobView, condition: JobCondition, evidence: Evidence) -> list[ExclusionOption]:
    """Returns ways to go on with some of those that carry on from a broken generation."""
    inside = {s.worker_id: s.holder for s in condition.survivors}
    # a stall accuses only where the transport itself says who does not answer
    stalled = SuspicionKind.STALLED
    broken = [s for s in condition.suspicions if s.broken or (s.kind is stalled and s.hosts)]
    return exclusion_options(_nodes(view, evidence, inside, broken), _accusations(view, broken))


def of_newcomers(view: JobView, condition: JobCondition, evidence: Evidence) -> list[ExclusionOption]:
    """Returns ways to build the pending record with fewer newcomers."""
    if view.generation is None:
        return []
    carried = {s.worker_id: s.holder for s in condition.survivors}
    new = {m.worker_id: False for m in view.generation.members if m.worker_id not in carried}
    nodes = _nodes(view, evidence, {**carried, **new}, condition.unbuilt)
    newcomers = {m.agent_id for m in view.generation.members if m.worker_id in new}
    return exclusion_options(nodes, _accusations(view, condition.unbuilt), newcomers)


def _nodes(
    view: JobView, evidence: Evidence, inside: dict[str, bool], reports: Iterable[SuspicionView]
) -> list[SuspectNode]:
    """Returns the nodes of the workers of `inside`, in rank order. inside: worker to whether it holds the state."""
    reporting = {view.members[s.worker_id].agent_id for s in reports}
    holders = {view.members[w].agent_id for w, holder in inside.items() if holder}
    found: dict[str, SuspectNode] = {}
    for placement in _in_rank_order(view, inside):
        agent_id = placement.agent_id
        quarantine = evidence.quarantines.get(agent_id)
        found[agent_id] = SuspectNode(
            agent_id=agent_id,
            node_name=placement.node_name,
            holder=agent_id in holders,
            reports=agent_id in reporting,
            times_left_out=0 if quarantine is None else quarantine.times,
        )
    return list(found.values())


def _in_rank_order(view: JobView, inside: dict[str, bool]) -> list[Placement]:
    """Returns the placements of the workers of `inside` that are there, in rank order."""
    if view.generation is None:
        return []
    return [m for m in view.generation.members if m.worker_id in inside and m.worker_id in view.members]


def _accusations(view: JobView, suspicions: Iterable[SuspicionView]) -> list[tuple[str, str]]:
    """Returns pairs (agent that says so, agent that it names)."""
    return [
        (view.members[s.worker_id].agent_id, accused)
        for s in suspicions
        for accused in named(view, s, sorted(view.agents))
    ]
