"""The input of a decision about the next generation, and the forms that its answers share. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from bagua_agent.base.plain_text import counted
from bagua_agent.base.sizes import AllowedSizes
from bagua_agent.membership import ended_before_joining
from bagua_agent.membership.actions import AskWhetherAlive, Decision, WriteGeneration
from bagua_agent.membership.failures.detection import Inquiry
from bagua_agent.membership.formation import targets
from bagua_agent.membership.formation.candidates import Offer, merged, offers, readiness, whole_offers
from bagua_agent.membership.formation.ending import fail
from bagua_agent.membership.formation.replicas import left_over
from bagua_agent.membership.job_condition import JobCondition
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.ranks import Chosen
from bagua_agent.membership.view import Desired, Evidence, JobView, Waiting
from bagua_agent.membership.worker_names import named, nodes_of
from bagua_contract.records import GenerationKind, Stage


@dataclass(frozen=True, slots=True)
class Case:
    """Holds all that a decision depends on."""

    view: JobView
    desired: Desired
    condition: JobCondition
    evidence: Evidence
    now_s: float
    policy: Policy

    @property
    def room(self) -> AllowedSizes:
        """The sizes that the next generation may have."""
        return self.view.room(self.desired)

    @property
    def least_to_start(self) -> int:
        """The number of nodes that the job's first generation needs."""
        return self.view.size_policy.least_to_start(self.desired.min_nodes, self.desired.max_nodes)

    @property
    def spares(self) -> dict[str, int]:
        """The number of each agent's workers that no replica has use for."""
        if self.view.replica_size <= 1:
            return {}
        return left_over(self.view, self.condition, self.now_s, self.policy)

    def offers(
        self,
        inside: Iterable[str],
        without: Collection[str] = (),
        stages: Collection[Stage] = (Stage.LOOP,),
    ) -> Waiters:
        found = offers(self.view, self.condition.present, frozenset(inside), self.policy, stages, self.spares)
        complete = [o for o in found if o.agent.agent_id not in without and o.complete_at_s <= self.now_s]
        held = {
            o.agent.agent_id for o in complete if self.evidence.is_quarantined(o.agent.agent_id, self.now_s)
        }
        ready = [o for o in complete if o.agent.agent_id not in held]
        reserve = [o for o in complete if o.agent.agent_id in held]
        if self.view.replica_size > 1:
            ready = whole_offers(ready)
            used = {m.worker_id for o in ready for m in o.workers}
            others = (
                replace(o, workers=tuple(m for m in o.workers if m.worker_id not in used)) for o in complete
            )
            reserve = whole_offers([o for o in others if o.workers])
        return Waiters(
            ready=ready,
            reserve=reserve,
            next_at_s=min(
                (o.complete_at_s for o in found if o.complete_at_s > self.now_s),
                default=None,
            ),
            released_at_s=min((self.evidence.quarantines[a].until_s for a in held), default=None),
        )


@dataclass(frozen=True, slots=True)
class Waiters:
    """The nodes that could join. ready: complete nodes that wait to join. reserve: those in quarantine. next_at_s: when
    another is complete. released_at_s: when the next quarantine ends."""

    ready: list[Offer]
    reserve: list[Offer]
    next_at_s: float | None
    released_at_s: float | None

    @property
    def every(self) -> list[Offer]:
        """The ready ones, and the reserve after them."""
        return merged(self.ready, self.reserve)

    @property
    def soon_s(self) -> float | None:
        return earlier(self.next_at_s, self.released_at_s)


def written(
    case: Case,
    kind: GenerationKind,
    workers: tuple[Chosen, ...],
    base: int,
    reason: str,
    *,
    again: bool = False,
    answers_at: tuple[str, ...] = (),
) -> Decision:
    """Returns the decision to write a generation of these workers. again, answers_at: see Generation."""
    record = targets.record_of(case.view, kind, workers, base, reason)
    generation = replace(record, again=again, answers_at=answers_at)
    previous = case.view.generation_number
    return Decision(
        WriteGeneration(generation, previous),
        f"generation {generation.number} ({kind.name}, {counted(len(workers), 'worker')}): {reason}",
    )


def too_few(
    case: Case,
    nodes: int,
    soon_s: float | None,
    why: str = "",
    stages: Collection[Stage] = (Stage.LOOP,),
    least: int | None = None,
) -> Decision:
    """Returns the decision to wait for more nodes, or to fail the job if that wait has lasted too long. least: by
    default the minimum."""
    lacking = readiness(case.view, case.condition.present, stages)
    alone = len(case.condition.unassigned)
    if alone:
        why = f"; {counted(alone, 'worker')} in no replica of {case.view.replica_size} yet{why}"
    so_far = f"{nodes} of {counted(least or case.desired.min_nodes, 'node')}{lacking}{why}"
    early = ended_before_joining.expected(case.view, case.policy)
    if early:
        fails_at_s = ended_before_joining.fails_at_s(case.view, case.policy)
        if fails_at_s is not None and case.now_s >= fails_at_s:
            return fail(f"too few nodes: {so_far}; {ended_before_joining.described(case.view)}")
        so_far, soon_s = f"{so_far}; {early}", earlier(soon_s, fails_at_s)
    wake_s, limit_s = soon_s, case.policy.below_minimum_timeout_s
    if limit_s is not None:
        until_s = case.evidence.waited_since_s(Waiting.MINIMUM, case.now_s) + limit_s
        if case.now_s >= until_s:
            return fail(f"too few nodes for {limit_s:g} s: {so_far}")
        wake_s = until_s if soon_s is None else min(soon_s, until_s)
    return Decision(None, f"waiting: {so_far}", wake_s, Waiting.MINIMUM)


def asking(case: Case, inquiry: Inquiry) -> Decision:
    """Returns the decision to ask the agents that the suspicions call in question, or to wait for their answers."""
    suspects = named(case.view, [s.worker_id for s in case.condition.suspicions])
    return Decision(
        AskWhetherAlive(inquiry.ask) if inquiry.ask else None,
        f"asking whether {nodes_of(case.view, inquiry.ask + inquiry.awaited)} live: suspected by {suspects}",
        inquiry.again_at_s,
    )


def earlier(one_s: float | None, other_s: float | None) -> float | None:
    return min((t for t in (one_s, other_s) if t is not None), default=None)
