"""Reads from the picture what hang.py decides on, and says what follows and when.

Pure. Considers the newest generation in which a worker waits; formation/ handles one in which a collective broke.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagua_agent.membership.disagreement import MemberWait, described
from bagua_agent.membership.failures.detection import named
from bagua_agent.membership.hang import (
    HangDecision,
    HangOrder,
    HangOutcome,
    HangSituation,
    MemberState,
    decide_hang,
    order_for,
)
from bagua_agent.membership.job_condition import JobCondition, in_force
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import Evidence, JobView, SuspicionView
from bagua_contract.records import Generation, Placement, SuspicionKind


@dataclass(frozen=True, slots=True)
class Hang:
    """The decision about a hang, and the order that follows from it. order: what the store should contain. due: RENEW,
    REPLACE and GIVE_UP may be acted on now, since stacks had their time. wake_at_s: decide again then."""

    decision: HangDecision
    order: HangOrder | None
    due: bool
    wake_at_s: float | None

    @property
    def renews(self) -> bool:
        return self.due and self.decision.outcome is HangOutcome.RENEW

    @property
    def gives_up(self) -> bool:
        return self.due and self.decision.outcome is HangOutcome.GIVE_UP


_NONE = Hang(HangDecision(HangOutcome.NOTHING, "no worker waits"), None, False, None)


def look(view: JobView, condition: JobCondition, evidence: Evidence, now_s: float, policy: Policy) -> Hang:
    """Decides whether the job hangs now, and what is to be done."""
    stalls = {s.worker_id: s for s in condition.suspicions if s.kind is SuspicionKind.STALLED}
    if not stalls:
        return _NONE
    record = view.record(max(s.generation for s in stalls.values()))
    if record is None:
        return _NONE  # this agent never saw it
    situation = _situation(view, condition, evidence, record, stalls)
    decision = decide_hang(situation, now_s, policy.hang_limits)
    order = order_for(decision, record.number, view.hang_order)
    if decision.outcome in (HangOutcome.NOTHING, HangOutcome.NAME, HangOutcome.DISAGREE) or decision.cut:
        return Hang(decision, order, decision.cut, decision.wake_at_s)
    due_s = view.hang_order_since_s + policy.stacks_first_s
    stands = order is not None and order is view.hang_order
    if not stands or now_s >= due_s:
        return Hang(decision, order, stands, decision.wake_at_s)
    return Hang(decision, order, False, due_s)


def ended_early(view: JobView, condition: JobCondition, now_s: float, policy: Policy) -> Hang | None:
    """Decides what follows if members ended with exit code 0 and another one can't go on without them; None if that is
    not so.

    The end of a newcomer does not count: the others never needed it. Where all members end, some end first, so it waits
    before it decides. It returns None while the node of a member is gone: that explains why others can't go on, and is
    handled as any loss.
    """
    record = view.record(condition.in_force)
    if record is None or any(_is_gone(view, m) for m in record.members):
        return None
    ended = [
        m
        for m in record.members
        if m.worker_id in view.finished and (record.base == 0 or m.since_generation < record.number)
    ]
    stuck = [s for s in condition.suspicions if s.generation == record.number]
    ranks = {m.worker_id: m.global_rank for m in record.members}
    stuck = [s for s in stuck if s.worker_id in ranks and s.kind is not SuspicionKind.UNBUILT]
    if not ended or not stuck:
        return None
    how = {
        m.global_rank: f"ended with exit code 0 (its last report was of step {view.finished_steps.get(m.worker_id, 0)})"
        for m in ended
    }
    places = [MemberWait(ranks[s.worker_id], s.waits_in) for s in stuck]
    reason = described(places, how)
    since_s = min(s.broken_since_s if s.broken else s.waiting_since_s for s in stuck)
    due_s = since_s + policy.disagreement_s
    if now_s < due_s:
        return Hang(HangDecision(HangOutcome.NOTHING, reason), None, False, due_s)
    decision = HangDecision(HangOutcome.DISAGREE, reason, tuple(m.worker_id for m in ended))
    return Hang(decision, order_for(decision, record.number, view.hang_order), False, None)


def _is_gone(view: JobView, placement: Placement) -> bool:
    """Tells whether the member's node is gone, and the member neither departed nor ended before."""
    ended = placement.worker_id in view.finished or placement.worker_id in view.failures
    return placement.agent_id not in view.agents and not ended and placement.worker_id not in view.departures


def standing_order(view: JobView) -> HangOrder | None:
    """Returns the current order, if it may still be true though it was not checked: of the generation in force or
    newer."""
    order = view.hang_order
    return None if order is None or order.generation < in_force(view, view.generation) else order


def _situation(
    view: JobView,
    condition: JobCondition,
    evidence: Evidence,
    record: Generation,
    stalls: dict[str, SuspicionView],
) -> HangSituation:
    holders = {s.worker_id for s in condition.survivors if s.holder}
    agents = sorted(view.agents)
    members = []
    for placement in record.members:
        member = condition.present.get(placement.worker_id)
        if member is None:
            continue  # it has ended, and no worker waits for it as far as is known
        stall = stalls.get(placement.worker_id)
        # Who waits in the generation before waits for the same worker as the newcomers of this one do.
        if stall is not None and stall.generation not in (record.number, record.base):
            stall = None
        members.append(
            MemberState(
                worker_id=placement.worker_id,
                global_rank=placement.global_rank,
                node_name=placement.node_name,
                waiting_since_s=None if stall is None else stall.waiting_since_s,
                outside_since_s=view.went_on.get(placement.worker_id),
                answers=placement.agent_id not in evidence.probes,
                holder=placement.worker_id in holders,
                newcomer=record.base > 0 and member.committed_generation < placement.since_generation,
                cannot_reach=()
                if stall is None
                else tuple(view.agents[a].node_name for a in named(view, stall, agents) if stall.hosts),
                # In the generation before, others number other operations.
                waits_in=stall.waits_in if stall is not None and stall.generation == record.number else None,
                mate_waits=any(w in stalls for w in member.replica if w != placement.worker_id),
            )
        )
    usual = [s.usual_step_s for s in stalls.values() if s.usual_step_s > 0]
    order, replacements = view.hang_order, view.replacements
    if order is not None and order.outcome is HangOutcome.REPLACE and order.generation == record.number:
        replacements -= len(order.workers)  # those are only about to be
    return HangSituation(
        generation=record.number,
        members=tuple(members),
        usual_step_s=_median(usual) if usual else None,
        renewals=view.attempts.count,
        replacements=max(0, replacements),
    )


def _median(values: list[float]) -> float:
    from statistics import median  # here, since it loads decimals and fractions, and most jobs never stall

    return median(values)
