"""Chooses the workers of the next generation, and builds its record.

Chooses among survivors and offers; decision.py decides whether the choice may be written. Present nodes have
precedence over new ones; above the size that is taken the youngest leave first. The nodes are of an allowed size
(`Room`), or fewer than the smallest. Nodes that leave and stay only until another worker has the state count too, where
an allowed size has room for one of them and one of the others. In a job with replicas all of them are whole: a replica
that would need one more node than there is room for is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from bagua_agent.base.plain_text import some
from bagua_agent.base.sizes import AllowedSizes
from bagua_agent.membership.formation.admission import job_fingerprint
from bagua_agent.membership.formation.candidates import Offer
from bagua_agent.membership.job_condition import JobCondition, Survivor, is_there
from bagua_agent.membership.ranks import Chosen, assign
from bagua_agent.membership.replica_groups import whole
from bagua_agent.membership.view import Desired, JobView, MemberView
from bagua_contract.records import Generation, GenerationKind


@dataclass(frozen=True, slots=True)
class Target:
    """The workers chosen for the next generation. held_back: names of leaving nodes that stay because no other worker
    has the state yet."""

    workers: tuple[Chosen, ...]
    held_back: tuple[str, ...] = ()

    @property
    def worker_ids(self) -> set[str]:
        return {w.worker_id for w in self.workers}

    @property
    def nodes(self) -> int:
        return len({w.agent_id for w in self.workers})

    @property
    def has_holder(self) -> bool:
        return any(w.holder for w in self.workers)


def next_number(view: JobView) -> int:
    # above what members remember too: the record may be lost
    return max(view.committed_generation, view.generation_number) + 1


def least_nodes(view: JobView, desired: Desired, condition: JobCondition) -> int:
    """Returns the fewest nodes that the next generation may have.

    A minimum raised above the generation in force stops no worker: as many nodes as before may go on. While a record is
    pending, either it or the generation before may be in force, so as many as the smaller one has.
    """
    record = view.generation
    if record is None or not record.members:
        return desired.min_nodes
    before = view.record(condition.in_force)
    if before is not None:
        return min(desired.min_nodes, record.node_count, before.node_count)
    # This leader came later. A pending record below the minimum shows that the minimum was raised; else it may not have
    # been, and the members that were in force may be fewer than it.
    if record.node_count >= desired.min_nodes:
        return desired.min_nodes
    return len({m.agent_id for m in record.members if m.since_generation <= condition.in_force})


def first(view: JobView, complete: Iterable[Offer], size: int) -> tuple[Chosen, ...]:
    """Returns the workers of the first generation, on `size` nodes."""
    return tuple(_joined(view, size, [], set(), complete))


def survivors(
    view: JobView,
    desired: Desired,
    condition: JobCondition,
    ready: Iterable[Offer],
    without: Collection[str] = (),
) -> Target:
    """Returns the survivors that stay. Newcomers are added only if these are too few, or if their number is no allowed
    size and newcomers complete the next one. without: agents that are left out."""
    room = view.room(desired)
    inside = _whole([_carried(view, condition, s) for s in condition.survivors if s.agent_id not in without])
    stay = _staying(view, inside)
    ready = list(ready)
    nodes, possible = min(_nodes(stay), room.most), _nodes_with(stay, ready)
    if nodes < least_nodes(view, desired, condition):
        size = room.fit(possible)
    elif room.fit(nodes) == nodes:
        size, ready = nodes, []
    else:
        above = room.next_above(nodes)
        size = above if above is not None and above <= possible else room.fit(nodes)
    return _with_holder(view, room, size, stay, ready, inside)


def planned(
    view: JobView,
    record: Generation,
    room: AllowedSizes,
    condition: JobCondition,
    ready: Iterable[Offer],
    without: Collection[str] = (),
) -> Target:
    """Returns all members that stay, and the joiners that may join: as many nodes as the room has for those that are
    there. without: agents whose joiners are left out."""
    carried = {s.worker_id for s in condition.survivors}
    inside = [_carried(view, condition, s) for s in condition.survivors]
    inside += [
        # came with the pending record: in it without a break, but without state
        _newcomer(view, condition.present[p.worker_id], p.since_generation)
        for p in record.members
        if is_there(p, condition.present) and p.worker_id not in carried and p.agent_id not in without
    ]
    inside = _whole(inside)
    stay = _staying(view, inside)
    ready = list(ready)
    size = room.fit(_nodes_with(stay, ready))
    return _with_holder(view, room, size, stay, ready, inside)


def record_of(
    view: JobView, kind: GenerationKind, workers: Iterable[Chosen], base: int, reason: str
) -> Generation:
    return Generation(
        number=next_number(view),
        base=base,
        kind=kind,
        members=assign(workers),
        nonce=view.nonce,
        reason=reason,
        fingerprint=dict(job_fingerprint(view)),
        settings=view.settings,
    )


def changes(record: Generation, target: Target) -> str:
    """Describes what a planned change changes, by node."""
    before = {m.worker_id: m.node_name for m in record.members}
    after = {w.worker_id: w.node_name for w in target.workers}
    parts = [
        f"{word} {_by_node([node for worker, node in these.items() if worker not in others])}"
        for word, these, others in (("adds", after, before), ("drops", before, after))
        if these.keys() - others.keys()
    ]
    return ", ".join(parts)


def _by_node(nodes: list[str]) -> str:
    workers = sorted(Counter(nodes).items())
    shown = (f"{node} ({number} workers)" if number > 1 else node for node, number in workers)
    return some(shown, joint=" and ", what="nodes")


def _nodes(workers: Iterable[Chosen]) -> int:
    return len({w.agent_id for w in workers})


def _nodes_with(workers: Iterable[Chosen], ready: Iterable[Offer]) -> int:
    return len({w.agent_id for w in workers} | {o.agent.agent_id for o in ready})


def _of_size(view: JobView, size: int, stay: list[Chosen], ready: Iterable[Offer]) -> list[Chosen]:
    kept, dropped = _within_most(view, size, stay)
    return _joined(view, size, kept, dropped, ready)


def _within_most(view: JobView, most: int, workers: list[Chosen]) -> tuple[list[Chosen], set[str]]:
    """Returns the workers of the oldest nodes, and the agents that are too many."""
    if any(w.replica for w in workers):
        return _replicas_within_most(view, most, workers)
    nodes: defaultdict[str, list[Chosen]] = defaultdict(list)
    for worker in workers:
        nodes[worker.agent_id].append(worker)
    by_age = sorted(
        nodes,
        key=lambda a: (
            # a node with state is worth more than an older one without
            not any(w.holder for w in nodes[a]),
            min(w.since_generation for w in nodes[a]),
            view.agents[a].join_revision,
            a,
        ),
    )
    kept = by_age[:most]
    return [w for a in kept for w in nodes[a]], set(by_age[most:])


def _replicas_within_most(view: JobView, most: int, workers: list[Chosen]) -> tuple[list[Chosen], set[str]]:
    kept: list[Chosen] = []
    for replica in _by_replica(view, workers):
        if _nodes([*kept, *replica]) <= most:
            kept += replica
    return kept, {w.agent_id for w in workers} - {w.agent_id for w in kept}


def _by_replica(view: JobView, workers: Iterable[Chosen]) -> list[list[Chosen]]:
    """Returns the workers by replica. The order is that of `_within_most`, with the youngest node of a replica for its
    nodes."""
    replicas: defaultdict[tuple[str, ...], list[Chosen]] = defaultdict(list)
    for worker in workers:
        replicas[worker.replica].append(worker)
    return sorted(
        replicas.values(),
        key=lambda found: (
            not all(w.holder for w in found),
            min(w.since_generation for w in found),
            max(view.agents[w.agent_id].join_revision for w in found),
            found[0].replica,
        ),
    )


def _joined(
    view: JobView, most: int, kept: list[Chosen], dropped: set[str], ready: Iterable[Offer]
) -> list[Chosen]:
    """Returns `kept`, and respawned workers of its nodes, and new nodes in join order while there is room."""
    result = list(kept)
    agents = {c.agent_id for c in kept}
    number = next_number(view)
    if view.replica_size > 1:
        newcomers = [_newcomer(view, m, number) for o in ready for m in o.workers]
        for replica in _by_replica(view, _whole(newcomers)):
            added = {w.agent_id for w in replica}
            if not added & dropped and len(agents | added) <= most:
                agents |= added
                result += replica
        return result
    for offer in ready:
        agent_id = offer.agent.agent_id
        if agent_id in dropped:
            continue
        if agent_id in agents or len(agents) < most:
            agents.add(agent_id)
            result += [_newcomer(view, m, number) for m in offer.workers]
    return result


def _with_holder(
    view: JobView, room: AllowedSizes, size: int, stay: list[Chosen], ready: list[Offer], inside: list[Chosen]
) -> Target:
    """Returns workers on `size` nodes. If none of them has the state: with leaving nodes that have it, all of them
    where every size is allowed, else as many as make an allowed size with the others."""
    workers = _of_size(view, size, stay, ready)
    if not workers or any(w.holder for w in workers):
        return Target(tuple(workers))
    stays = {c.worker_id for c in stay}
    back = [c for c in inside if c.holder and c.worker_id not in stays]
    size = room.fit(_nodes([*workers, *back])) if back else 0
    # one that has the state, and one that gets it
    if room.limited and size > 1 and room.policy.forbidden(size) is None:
        others = min(_nodes(workers), size - 1)
        workers = _of_size(view, others, stay, ready)
        back, _ = _within_most(view, size - others, back)
    return Target((*workers, *back), tuple(sorted({c.node_name for c in back if _leaves(view, c)})))


def _staying(view: JobView, inside: list[Chosen]) -> list[Chosen]:
    """Returns the workers that stay. A node that leaves takes along all replicas that have a part there."""
    return _whole([c for c in inside if not _leaves(view, c)])


def _whole(workers: list[Chosen]) -> list[Chosen]:
    ids = whole((w.worker_id, w.replica) for w in workers)
    return [w for w in workers if w.worker_id in ids]


def _leaves(view: JobView, worker: Chosen) -> bool:
    return view.agents[worker.agent_id].leaving


def _newcomer(view: JobView, member: MemberView, since_generation: int) -> Chosen:
    agent = view.agents[member.agent_id]
    return Chosen(
        worker_id=member.worker_id,
        agent_id=member.agent_id,
        node_name=agent.node_name,
        slot=member.slot,
        topology=agent.topology,
        store_address=member.store_address,
        since_generation=since_generation,
        join_revision=member.join_revision,
        holder=False,
        replica=member.replica,
    )


def _carried(view: JobView, condition: JobCondition, survivor: Survivor) -> Chosen:
    member = condition.present[survivor.worker_id]
    return Chosen(
        worker_id=survivor.worker_id,
        agent_id=survivor.agent_id,
        node_name=survivor.node_name,
        slot=member.slot,
        topology=view.agents[survivor.agent_id].topology,
        store_address=member.store_address,
        since_generation=survivor.since_generation,
        join_revision=survivor.join_revision,
        holder=survivor.holder,
        replica=member.replica,
    )
