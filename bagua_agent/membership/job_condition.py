"""Derives which generations may be in force, their survivors and losses, and the holders of the state.

Derived from the picture alone, so a new leader derives the same. Decides nothing.

A PLANNED record with number N and base B is pending until a worker is known to have committed in N. Until
then B and N may both be in force: reports of commits come late. So

- only workers that are in both count as carried over. In the record these are the placements whose
  since_generation is at most the in-force bound: a worker that came with N has since_generation N.
- a worker of B that N leaves out does not count as a holder. If N is in force it has stepped aside and its
  state is old; if it then were taken as the holder, the steps of N would be done twice. That holds even if no
  carried-over worker is left: one of the dead may have switched alone and released steps of N.
- for the same reason a worker that a record left out gets a new since_generation when it comes back, even
  while its old generation may be in force. Copying a state once too often is harmless.

The base's record is remembered (JobView.earlier) to notice at once the death of a worker that the pending record
leaves out. A leader that never saw it learns of such a death through the suspicions of the others.

An empty record (all workers step aside, because too few nodes would remain) has no members, so the holders of the
state are read from the record that it followed, whose number is its base. A leader that never saw that one
takes the workers known to have committed in the base: this may miss a holder, but never finds a false one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from bagua_agent.membership.policy import Policy
from bagua_agent.membership.replica_groups import Groups, groups, present_as_whole
from bagua_agent.membership.view import Evidence, JobView, MemberView, SuspicionView
from bagua_contract.records import Generation, GenerationKind, Placement, SuspicionKind


@dataclass(frozen=True, slots=True)
class Survivor:
    """A worker that carries on from the generation in force. holder: known to have the job's state."""

    worker_id: str
    agent_id: str
    node_name: str
    since_generation: int
    join_revision: int
    holder: bool


@dataclass(frozen=True, slots=True)
class JobCondition:
    """The generation in force, with the workers that survive it, are lost, or are missing.

    in_force: the newest generation known to be in force (a lower bound); 0: none. present: workers that are there, by
    id; in a job with replicas those whose replicas are there as a whole. unassigned: workers that are there and in no
    replica, in such a job. survivors: see above. lost: members that break what may be in force. newcomers_gone: members
    of the pending record that died before it was in force. missing: members whose keys are gone, but that are given
    until missing_until_s to put them again. unbuilt: those of the suspicions that say that the pending record can't
    come into force.
    """

    in_force: int
    pending: bool
    present: Mapping[str, MemberView]
    survivors: tuple[Survivor, ...]
    lost: tuple[str, ...]
    newcomers_gone: tuple[str, ...]
    missing: tuple[str, ...]
    missing_until_s: float
    suspicions: tuple[SuspicionView, ...]
    unbuilt: tuple[SuspicionView, ...] = ()
    unassigned: tuple[MemberView, ...] = ()

    @property
    def has_holder(self) -> bool:
        return any(s.holder for s in self.survivors)


def in_force(view: JobView, record: Generation | None) -> int:
    """Returns the newest generation up to `record` that is known to be in force; 0 without a record."""
    if record is None:
        return 0
    at_once = record.kind is GenerationKind.FAILOVER or record.base == 0
    known = max(record.base, view.committed_generation, view.closing_generation or 0)
    return record.number if at_once else min(known, record.number)


def job_condition(view: JobView, evidence: Evidence, now_s: float, policy: Policy) -> JobCondition:
    record = view.generation
    bound = in_force(view, record)
    known = groups(view)
    alive = _present(view, evidence)
    present = alive if view.replica_size <= 1 else present_as_whole(alive, known)
    since = {} if record is None else {m.worker_id: m.since_generation for m in record.members}
    weighed = tuple(
        _weigh(s, record, bound, since)
        for s in sorted(view.suspicions.values(), key=lambda s: s.worker_id)
        # Rule 4: suspicions older than the generation in force are obsolete.
        if record is not None and bound <= s.generation <= record.number and s.worker_id in alive
    )
    suspicions = tuple(s for s, weight in weighed if weight is not _Weight.NOTHING)
    pending = record is not None and bound < record.number
    grace_until_s = evidence.elected_at_s + policy.election_grace_s
    lost: list[str] = []
    newcomers_gone: list[str] = []
    missing: list[str] = []
    if record is not None:
        for placement in record.members:
            if is_there(placement, present):
                continue
            absent = _absent_with(view, record, placement, alive)
            if absent and all(
                _is_excused(view, evidence, p, suspicions, now_s < grace_until_s) for p in absent
            ):
                missing.append(placement.worker_id)
            elif placement.since_generation > bound:
                newcomers_gone.append(placement.worker_id)
            else:
                lost.append(placement.worker_id)
        if pending:
            lost += _lost_outside(view, record, bound, present, suspicions)
    return JobCondition(
        in_force=bound,
        pending=pending,
        present=present,
        survivors=_holding_together(_survivors(view, bound, present), present),
        lost=tuple(lost),
        newcomers_gone=tuple(newcomers_gone),
        missing=tuple(missing),
        missing_until_s=grace_until_s,
        suspicions=suspicions,
        unbuilt=tuple(s for s, weight in weighed if weight is _Weight.UNBUILT),
        unassigned=_unassigned(view, alive, known),
    )


def _absent_with(
    view: JobView, record: Generation, placement: Placement, alive: Mapping[str, MemberView]
) -> list[Placement]:
    """Returns the workers whose absence makes the member of `placement` absent: itself, or others of its replica."""
    if view.replica_size <= 1:
        return [placement]
    start = placement.global_rank - placement.global_rank % view.replica_size
    return [p for p in record.members[start : start + view.replica_size] if not is_there(p, alive)]


def _unassigned(view: JobView, alive: Mapping[str, MemberView], known: Groups) -> tuple[MemberView, ...]:
    if view.replica_size <= 1:
        return ()
    return tuple(m for w, m in alive.items() if w not in known.of and w not in known.over)


def _holding_together(
    survivors: tuple[Survivor, ...], present: Mapping[str, MemberView]
) -> tuple[Survivor, ...]:
    """Returns the survivors, each a holder only if all workers of its replica are holders."""
    holders = {s.worker_id for s in survivors if s.holder}
    return tuple(
        replace(s, holder=all(w in holders for w in present[s.worker_id].replica or (s.worker_id,)))
        for s in survivors
    )


class _Weight(Enum):
    AS_TOLD = auto()
    UNBUILT = auto()  # the pending record can't come into force; the generation before it goes on
    NOTHING = auto()  # about a record that was given up


def _weigh(
    suspicion: SuspicionView, record: Generation | None, bound: int, since: Mapping[str, int]
) -> tuple[SuspicionView, _Weight]:
    """Decides how a suspicion of a generation from `bound` up to `record` counts, and returns it with the kind that it
    then has. since: since_generation of the record's members.

    That the pending record can't be built somewhere breaks nothing. Nor does a newcomer that could not enter it: if the
    others did, they say so themselves. But a stall in a generation that a newer planned record superseded is a break:
    its members switched to it all the same, wait there for a newcomer that the newer record gave up, and will never
    bring the newer one.
    """
    if record is None or suspicion.generation <= bound:
        return suspicion, _Weight.AS_TOLD
    newcomer = since.get(suspicion.worker_id, bound + 1) > bound
    if suspicion.kind is SuspicionKind.UNBUILT or (suspicion.broken and newcomer):
        if suspicion.generation < record.number:
            return suspicion, _Weight.NOTHING
        return replace(suspicion, kind=SuspicionKind.UNBUILT), _Weight.UNBUILT
    if record.base < suspicion.generation < record.number:
        return replace(suspicion, kind=SuspicionKind.BROKEN), _Weight.AS_TOLD
    return suspicion, _Weight.AS_TOLD


def _present(view: JobView, evidence: Evidence) -> dict[str, MemberView]:
    """Returns the workers that are ready, on an agent that lives, and neither refused nor known to have ended."""
    there = {a.agent_id for a in view.agents.values() if not evidence.is_dead(a)}
    return {
        worker_id: m
        for worker_id, m in view.members.items()
        if m.agent_id in there
        and worker_id not in view.failures
        and worker_id not in view.finished
        and worker_id not in view.refused
        and worker_id not in evidence.dead_workers
    }


def _is_excused(
    view: JobView,
    evidence: Evidence,
    placement: Placement,
    suspicions: Iterable[SuspicionView],
    in_grace: bool,
) -> bool:
    """Tells whether a missing member need not be dropped now: no worker suspects it, and it may come back or has ended
    well together with all others."""
    if (
        placement.worker_id in view.failures
        or placement.worker_id in evidence.dead_workers
        or any(suspicions)
    ):
        return False
    if placement.worker_id in view.finished:
        # but one that ended before it ever came in will not bring the switch
        return placement.since_generation <= in_force(view, view.generation)
    agent = view.agents.get(placement.agent_id)
    return in_grace and (agent is None or not evidence.is_dead(agent))


def _lost_outside(
    view: JobView,
    record: Generation,
    bound: int,
    present: Mapping[str, MemberView],
    suspicions: Iterable[SuspicionView],
) -> list[str]:
    """Returns the members of the generation in force that the pending record leaves out, and that are gone.

    Most have left as they were asked, which proves nothing. But if one failed, or a worker that is still in that
    generation misses a peer, the switch will never happen.
    """
    base = view.record(bound)
    if base is None:
        return []
    missed = any(s.generation == bound for s in suspicions)
    inside = {m.worker_id for m in record.members}
    return [
        m.worker_id
        for m in base.members
        if m.worker_id not in inside
        and m.worker_id not in present
        and (missed or m.worker_id in view.failures)
    ]


def _survivors(view: JobView, bound: int, present: Mapping[str, MemberView]) -> tuple[Survivor, ...]:
    record = view.generation
    if record is not None and not record.members:
        followed = view.record(record.base)
        if followed is None:
            return _committed_in(view, record.base, present)
        return _carried(followed, in_force(view, followed), present)
    if record is None:
        # The record is lost (etcd lost its keys) but members remember: the furthest hold the state.
        furthest = max((m.committed_generation for m in present.values()), default=0)
        return _committed_in(view, furthest, present) if furthest else ()
    return _carried(record, bound, present)


def is_there(placement: Placement, present: Mapping[str, MemberView]) -> bool:
    """Tells whether the worker is present on the agent that the record names. No leader writes another, but a client
    that may write to etcd can."""
    member = present.get(placement.worker_id)
    return member is not None and member.agent_id == placement.agent_id


def _carried(record: Generation, bound: int, present: Mapping[str, MemberView]) -> tuple[Survivor, ...]:
    return tuple(
        _survivor(record, p, present[p.worker_id])
        for p in record.members
        if is_there(p, present) and p.since_generation <= bound
    )


def _survivor(record: Generation, placement: Placement, member: MemberView) -> Survivor:
    return Survivor(
        worker_id=placement.worker_id,
        agent_id=placement.agent_id,
        node_name=placement.node_name,
        since_generation=placement.since_generation,
        join_revision=placement.join_revision,
        holder=placement.holder
        # its first commit here is reported, so it is no longer behind
        or member.committed_generation >= placement.since_generation
        # in a first generation all begin alike
        or record.base == 0,
    )


def _committed_in(view: JobView, number: int, present: Mapping[str, MemberView]) -> tuple[Survivor, ...]:
    return tuple(
        Survivor(
            worker_id=m.worker_id,
            agent_id=m.agent_id,
            node_name=view.agents[m.agent_id].node_name,
            since_generation=number,
            join_revision=m.join_revision,
            holder=True,
        )
        for m in sorted(present.values(), key=lambda m: m.join_revision)
        if m.committed_generation >= number > 0
    )
