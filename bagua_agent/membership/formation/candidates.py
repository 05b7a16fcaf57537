"""Lists the nodes that could join, and since when: complete nodes in join order.

A node is complete when all its slots are ready, or when its own short window has passed since the first waiting worker.
Does not know generations: the caller names the workers that are members already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from bagua_agent.base.plain_text import first_of
from bagua_agent.membership.formation.admission import misfits
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.replica_groups import whole_members
from bagua_agent.membership.view import AgentView, JobView, MemberView
from bagua_contract.records import Stage


@dataclass(frozen=True, slots=True)
class Offer:
    """A node's workers that wait to join. complete_at_s: when the wait for its other workers ends."""

    agent: AgentView
    workers: tuple[MemberView, ...]
    complete_at_s: float


def offers(
    view: JobView,
    present: Mapping[str, MemberView],
    inside: Collection[str],
    policy: Policy,
    stages: Collection[Stage] = (Stage.LOOP,),
    spares: Mapping[str, int] = MappingProxyType({}),
) -> list[Offer]:
    """Returns the offers of all nodes, in join order. inside: workers that are in, and whose slots are so taken.
    stages: of workers that count. spares: workers by agent that no replica has use for."""
    unfit = misfits(view)
    taken: defaultdict[str, set[int]] = defaultdict(set)
    waiting: defaultdict[str, list[MemberView]] = defaultdict(list)
    for worker_id in inside:
        if worker_id in present:
            taken[present[worker_id].agent_id].add(present[worker_id].slot)
    for member in sorted(present.values(), key=lambda m: m.join_revision, reverse=True):
        # the newest worker of a slot: an older one of the same slot has ended
        if (
            member.worker_id not in inside
            and member.stage in stages
            and member.worker_id not in unfit
            and member.slot not in taken[member.agent_id]
            and not view.agents[member.agent_id].leaving
        ):
            taken[member.agent_id].add(member.slot)
            waiting[member.agent_id].append(member)
    found = [
        Offer(
            agent=view.agents[agent_id],
            workers=tuple(sorted(workers, key=lambda m: m.slot)),
            complete_at_s=_complete_at_s(
                view.agents[agent_id], workers, len(taken[agent_id]) + spares.get(agent_id, 0), policy
            ),
        )
        for agent_id, workers in waiting.items()
    ]
    return sorted(found, key=lambda o: (o.agent.join_revision, o.agent.agent_id))


def whole_offers(found: Collection[Offer]) -> list[Offer]:
    """Returns the offers of the nodes that have workers whose replicas are in `found` as a whole, with only these
    workers."""
    kept = {m.worker_id for m in whole_members([m for o in found for m in o.workers])}
    parts = [replace(o, workers=tuple(m for m in o.workers if m.worker_id in kept)) for o in found]
    return [o for o in parts if o.workers]


def merged(one: Collection[Offer], other: Collection[Offer]) -> list[Offer]:
    """Returns the workers of both; a node that is in both has one offer."""
    found = {o.agent.agent_id: o for o in one}
    for offer in other:
        known = found.get(offer.agent.agent_id)
        workers = offer.workers if known is None else (*known.workers, *offer.workers)
        found[offer.agent.agent_id] = replace(offer, workers=workers)
    return list(found.values())


def _complete_at_s(agent: AgentView, workers: list[MemberView], ready: int, policy: Policy) -> float:
    if ready >= agent.slots:
        return max(w.ready_since_s for w in workers)
    return min(w.ready_since_s for w in workers) + policy.node_window_s


def readiness(
    view: JobView, present: Mapping[str, MemberView], stages: Collection[Stage] = (Stage.LOOP,)
) -> str:
    """Describes which nodes are awaited and what they lack, for the reason of a wait; empty if none."""
    ready: defaultdict[str, set[int]] = defaultdict(set)
    for member in present.values():
        if member.stage not in stages:
            continue
        ready[member.agent_id].add(member.slot)
    lacking = [
        f"{a.node_name} has {len(ready[a.agent_id])} of {a.slots} workers ready"
        for a in sorted(view.agents.values(), key=lambda a: a.join_revision)
        if not a.leaving and len(ready[a.agent_id]) < a.slots
    ]
    shown = first_of(lacking)
    # its agent is there, and has given up all its slots
    shown += [f"{a.node_name} starts no more workers" for a in view.agents.values() if a.slots == 0][:8]
    return f" ({', '.join(shown)})" if shown else ""
