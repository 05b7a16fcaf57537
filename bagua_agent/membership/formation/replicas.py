"""Decides which workers form a replica, and which replicas are over: docs/design/replicas.md, "Membership". Pure.

Forms no generation. Reads the whole picture each time, like decision.py: a record that was written is seen in the
picture, and one that was not is decided again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from bagua_agent.base.plain_text import shortened, some
from bagua_agent.membership.failures.root_cause import KEY_IS_GONE, LOST_WITH_NODE, REPLICA_OVER
from bagua_agent.membership.formation.groups_in_reach import groups_in_reach
from bagua_agent.membership.job_condition import JobCondition, job_condition
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.replica_groups import groups, groups_in
from bagua_agent.membership.view import AgentView, Evidence, JobView, MemberView
from bagua_contract.records import Stage
from bagua_contract.replica import Replica, ReplicaMember


@dataclass(frozen=True, slots=True)
class ReplicaChanges:
    """The records that should be written. formed: new ones. over: with the reason why they are over. forgotten: ids of
    those that are no longer needed. next_at_s: when to decide again if nothing happens before."""

    formed: tuple[Replica, ...] = ()
    over: tuple[Replica, ...] = ()
    forgotten: tuple[str, ...] = ()
    next_at_s: float | None = None


def decide_replicas(view: JobView, evidence: Evidence, now_s: float, policy: Policy) -> ReplicaChanges:
    """Decides which records of replicas the picture calls for now; none in a job without replicas."""
    if view.replica_size <= 1 or view.restarts:
        return ReplicaChanges()
    condition = job_condition(view, evidence, now_s, policy)
    records = groups(view).records
    over, wait_s = _ended(view, condition, evidence, records, now_s)
    forgotten = tuple(
        sorted(
            replica_id
            for replica_id in view.replicas
            # one that contradicts an older record counts for no worker
            if (r := records.get(replica_id)) is None or (r.over and not _has_member(view, r))
        )
    )
    formed, complete_s = ((), None) if view.closing else assembly(view, condition, now_s, policy)
    next_at_s = min((t for t in (wait_s, complete_s) if t is not None), default=None)
    return ReplicaChanges(formed, over, forgotten, next_at_s)


def assembly(
    view: JobView, condition: JobCondition, now_s: float, policy: Policy
) -> tuple[tuple[Replica, ...], float | None]:
    """Returns the replicas that can be formed now, and when another node is complete."""
    size, waiting = view.replica_size, _waiting(view, condition)
    rest: list[MemberView] = []
    found: list[list[MemberView]] = []
    due_s: list[float] = []
    joined = _joined_at_s(view, condition, waiting, policy)
    for agent_id in sorted(waiting, key=lambda a: _place(view.agents[a])):
        agent, workers = view.agents[agent_id], waiting[agent_id]
        complete_at_s = _complete_at_s(agent, workers, condition, policy)
        if complete_at_s > now_s:
            due_s.append(complete_at_s)
            continue
        own = len(workers) // size * size
        found += [workers[i : i + size] for i in range(0, own, size)]
        rest += workers[own:]
    across = _across(view, rest)
    if across and joined > now_s:
        due_s.append(joined)
    else:
        found += across
    return tuple(_formed(view, workers) for workers in found), min(due_s, default=None)


def _across(view: JobView, workers: list[MemberView]) -> list[list[MemberView]]:
    """Returns replicas of workers of several nodes, in the order of `workers`; none of nodes that have just failed to
    reach each other. The first worker that can be completed by later ones is, so the others wait for another
    partner."""
    size = view.replica_size
    if not any(view.agents[w.agent_id].cut_off for w in workers):
        return [workers[i : i + size] for i in range(0, len(workers) // size * size, size)]
    by_agent: defaultdict[str, list[MemberView]] = defaultdict(list)
    for worker in workers:
        by_agent[worker.agent_id].append(worker)
    number = {agent_id: i for i, agent_id in enumerate(by_agent)}
    cut_off: list[set[int]] = [set() for _ in number]
    for one, i in number.items():
        for j in (number[other] for other in view.agents[one].cut_off if other in number):
            cut_off[i].add(j)
            cut_off[j].add(i)
    of_each = [iter(found) for found in by_agent.values()]
    hosts = groups_in_reach([len(found) for found in by_agent.values()], cut_off, size)
    return [[next(of_each[host]) for host in group] for group in hosts]


def left_over(view: JobView, condition: JobCondition, now_s: float, policy: Policy) -> dict[str, int]:
    """Counts the spares of each agent: workers that wait for a replica and of which none can be formed."""
    formed, next_at_s = assembly(view, condition, now_s, policy)
    if formed or next_at_s is not None:
        return {}
    return {agent_id: len(workers) for agent_id, workers in _waiting(view, condition).items()}


def _waiting(view: JobView, condition: JobCondition) -> dict[str, list[MemberView]]:
    """Returns by agent the workers that wait for a replica, in the order of their slots."""
    newest: defaultdict[str, dict[int, MemberView]] = defaultdict(dict)
    for member in sorted(condition.unassigned, key=lambda m: m.join_revision):
        # the newest worker of a slot: an older one of the same slot has ended
        if member.stage is Stage.ASSEMBLING and not view.agents[member.agent_id].leaving:
            newest[member.agent_id][member.slot] = member
    taken = {(m.agent_id, m.slot) for m in condition.present.values()}
    return {
        agent_id: found
        for agent_id, slots in newest.items()
        if (found := [slots[slot] for slot in sorted(slots) if (agent_id, slot) not in taken])
    }


def _complete_at_s(
    agent: AgentView, workers: list[MemberView], condition: JobCondition, policy: Policy
) -> float:
    """Returns when a node is complete. As in candidates.py, a node that lacks workers is waited for a short while."""
    taken = sum(m.agent_id == agent.agent_id for m in condition.present.values())
    if taken + len(workers) >= agent.slots:
        return max(w.ready_since_s for w in workers)
    return min(w.ready_since_s for w in workers) + policy.node_window_s


def _joined_at_s(
    view: JobView, condition: JobCondition, waiting: Mapping[str, list[MemberView]], policy: Policy
) -> float:
    """Returns when workers of several nodes may be joined: at once if no node has workers to come, else after a short
    while, so that neighbours are joined although their workers do not start in the order of their nodes."""
    taken = Counter(m.agent_id for m in condition.present.values())
    taken.update({agent_id: len(workers) for agent_id, workers in waiting.items()})
    if all(a.leaving or taken[a.agent_id] >= a.slots for a in view.agents.values()):
        return float("-inf")
    first_s = min((w.ready_since_s for workers in waiting.values() for w in workers), default=float("-inf"))
    return first_s + policy.node_window_s


def _place(agent: AgentView) -> tuple[str, int, str]:
    return (agent.topology, agent.join_revision, agent.agent_id)


def _formed(view: JobView, workers: list[MemberView]) -> Replica:
    """Returns a new replica, named after its first worker, so that a record which is written again is the same one."""
    return Replica(
        replica_id=workers[0].worker_id,
        members=tuple(
            ReplicaMember(
                worker_id=w.worker_id,
                agent_id=w.agent_id,
                node_name=view.agents[w.agent_id].node_name,
                slot=w.slot,
                store_address=w.store_address,
                # in a large job the others do not follow this agent's key
                control_address=view.agents[w.agent_id].control_address,
            )
            for w in workers
        ),
        nonce=view.nonce,
    )


def _ended(
    view: JobView,
    condition: JobCondition,
    evidence: Evidence,
    records: Mapping[str, Replica],
    now_s: float,
) -> tuple[tuple[Replica, ...], float | None]:
    """Returns the replicas that are over and whose records do not say so yet; and until when missing workers may come
    back."""
    found, wait_s = [], None
    in_grace = now_s < condition.missing_until_s
    for replica in (*records.values(), *_without_record(view)):
        if replica.over or all(w in condition.present for w in replica.worker_ids):
            continue
        gone = [(m, why) for m in replica.members if (why := _why_gone(view, evidence, m))]
        # what was killed for another one says nothing new
        gone = [(m, why) for m, why in gone if not _is_for_replica(view, m)] or gone
        absent = [
            m for m in replica.members if m.worker_id not in view.members and m.worker_id not in view.finished
        ]
        # a generation is made without it, so the time that a missing key is given is over
        is_lost = any(w in condition.lost for w in replica.worker_ids)
        if not gone and absent and in_grace and not is_lost:
            wait_s = condition.missing_until_s
        elif gone or absent:
            gone = gone or [(m, KEY_IS_GONE) for m in absent]
            found.append(replace(replica, over=_reason(gone)))
    return tuple(sorted(found, key=lambda r: r.replica_id)), wait_s


def _without_record(view: JobView) -> list[Replica]:
    """Returns the replicas of members that have no record, though a worker of them is there: a client removed it from
    etcd."""
    if view.generation is None:
        return []
    return [
        Replica(
            members[0].worker_id,
            tuple(
                ReplicaMember(m.worker_id, m.agent_id, m.node_name, m.slot, m.store_address) for m in members
            ),
            view.nonce,
        )
        for members in groups_in(view.generation, view.replica_size)
        if members[0].worker_id not in view.replicas and any(m.worker_id in view.members for m in members)
    ]


def _why_gone(view: JobView, evidence: Evidence, member: ReplicaMember) -> str:
    """Returns why the worker is gone; empty: it is there, or may come back, or has ended together with the job."""
    worker_id, agent = member.worker_id, view.agents.get(member.agent_id)
    failure = view.failures.get(worker_id)
    if failure is not None:
        return f"{'failed' if failure.script_failure else 'ended'}: {shortened(failure.summary, 120)}"
    if worker_id in view.departures:
        return "left"
    if worker_id in view.refused:
        return "was refused"
    if agent is not None and evidence.is_dead(agent):
        return LOST_WITH_NODE
    if worker_id in evidence.dead_workers:
        return "has ended"
    trains = view.generation is not None and view.generation.placement_of(worker_id) is not None
    if worker_id in view.finished and not trains and not view.closing:
        return "ended with exit code 0"
    return ""


def _is_for_replica(view: JobView, member: ReplicaMember) -> bool:
    failure = view.failures.get(member.worker_id)
    return failure is not None and failure.summary.startswith(REPLICA_OVER)


def _reason(gone: Iterable[tuple[ReplicaMember, str]]) -> str:
    return some([f"the worker in slot {m.slot} of {m.node_name} {why}" for m, why in gone], 4)


def _has_member(view: JobView, replica: Replica) -> bool:
    return any(w in view.members for w in replica.worker_ids)
