"""Decides what happens before the first step of a job whose scripts need ranks before they have a model. Pure.

The job's first workers, the *cohort*, meet in init_process_group(): a GATHERING record gives them ranks and a
communicator, and no state. Once all of them are at their first step boundary the first generation follows, with the
same workers and ranks. If one of them is lost before, none can go on: its work before the loop (a download, its part in
a broadcast) is gone, and the others have passed it. So an empty GATHERING record follows, which ends them all, and
their successors gather anew.

A worker in init_process_group() (WAITING) is in no other generation. One that comes while the job trains goes on by
itself (PREPARING) and joins at its first step boundary (LOOP). A script that needs nothing before is LOOP at once.

Invariants: a gathering lists whole nodes; the ranks of the first generation are those of its gathering; no gathering
follows a generation with a holder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bagua_agent.base.backoff import delay_s
from bagua_agent.base.plain_text import counted, some
from bagua_agent.membership import ended_before_joining
from bagua_agent.membership.actions import Decision
from bagua_agent.membership.exclusion import ExclusionOption
from bagua_agent.membership.failures import hanging, trouble
from bagua_agent.membership.failures.detection import inquire
from bagua_agent.membership.formation import targets
from bagua_agent.membership.formation.candidates import Offer, whole_offers
from bagua_agent.membership.formation.case import Case, asking, earlier, too_few, written
from bagua_agent.membership.formation.ending import fail
from bagua_agent.membership.ranks import Chosen
from bagua_agent.membership.view import AgentView
from bagua_agent.membership.worker_names import lost, named
from bagua_contract.records import Generation, GenerationKind, Placement, Stage

# One at a step boundary is of a script that asks for nothing before its loop on this rank.
_GATHERED = (Stage.WAITING, Stage.LOOP)


def is_called_for(case: Case) -> bool:
    """Tells whether workers wait in init_process_group(), so that a first generation has to begin with a gathering."""
    return any(m.stage is Stage.WAITING for m in case.condition.present.values())


def decide(case: Case) -> Decision | None:
    """Decides what follows a gathering; None: the newest record is no gathering."""
    record = case.view.generation
    if record is None or not record.is_gathering:
        return None
    return _gathered(case, record) if record.members else gather(case, "", again=record.again)


def gather(case: Case, why: str, *, again: bool) -> Decision:
    """Decides on the next cohort: every worker of every node that is there, up to the most. why: what came before, if
    anything. again: the job trained before."""
    record = case.view.generation
    if record is None or not record.is_gathering:
        stages = {m.stage for m in case.condition.present.values()}
        # What such a worker asked for before its loop was answered by members that are gone.
        if Stage.PREPARING in stages or (again and Stage.LOOP in stages):
            return _restart(case, why or "some of them are ahead of the others", again=again)
    least, most = case.desired.min_nodes if again else case.least_to_start, case.desired.max_nodes
    waiters = case.offers((), stages=_GATHERED)
    spares = case.spares
    usable = whole_offers([o for o in waiters.ready if _is_whole(o, spares)])
    if len(usable) < least:
        usable = whole_offers([o for o in waiters.every if _is_whole(o, spares)])
    reason = f"; {why}" if why else ""
    if len(usable) < least:
        return too_few(case, len(usable), waiters.released_at_s, reason, _GATHERED, least)
    complete = {o.agent.agent_id for o in usable}
    awaited = [a for a in _coming(case) if a.agent_id not in complete and spares.get(a.agent_id, 0) < a.slots]
    if awaited and len(usable) < most:
        names = some(a.node_name for a in awaited)
        return Decision(
            None,
            f"waiting for every worker of {names} to come to init_process_group() or its first step{reason}",
            waiters.released_at_s,
        )
    last_call_until_s = max(o.complete_at_s for o in usable) + case.policy.last_call_s
    if len(usable) < most and case.now_s < last_call_until_s:
        reason = f"last call: {len(usable)} of at most {counted(most, 'node')} ready{reason}"
        return Decision(None, reason, earlier(waiters.released_at_s, last_call_until_s))
    size = case.room.fit(len(usable))
    chosen = targets.first(case.view, usable, size)
    found = f"{counted(size, 'node')} {'is' if size == 1 else 'are'} ready"
    return written(case, GenerationKind.GATHERING, chosen, 0, f"{found}{reason}", again=again)


def _is_whole(offer: Offer, spares: Mapping[str, int]) -> bool:
    """Tells whether each slot of the offer's node has a worker that is offered or a spare. spares: workers by agent
    that no replica has use for."""
    return len(offer.workers) + spares.get(offer.agent.agent_id, 0) >= offer.agent.slots


def _coming(case: Case) -> list[AgentView]:
    """Returns the nodes whose workers are expected."""
    never_whole = {e.agent_id for e in ended_before_joining.ends_of(case.view)}
    return [
        a
        for a in sorted(case.view.agents.values(), key=lambda a: a.join_revision)
        if not a.leaving
        and a.agent_id not in never_whole
        and a.slots > 0
        and not case.evidence.is_dead(a)
        and not case.evidence.is_quarantined(a.agent_id, case.now_s)
    ]


def _gathered(case: Case, record: Generation) -> Decision:
    """Decides what follows while the cohort runs the code before the loop."""
    order = hanging.standing_order(case.view)
    urgent = _who_is_missing(case)
    if urgent is not None:
        return replace(urgent, hang_order=order)
    condition = case.condition
    before = [m for m in record.members if condition.present[m.worker_id].stage is not Stage.LOOP]
    if not before:
        chosen = tuple(_enters(case, m) for m in record.members)
        reason = "training begins again" if record.again else "training begins"
        kind = GenerationKind.FAILOVER if record.again else GenerationKind.PLANNED
        return replace(written(case, kind, chosen, 0, reason), hang_order=order)
    # No worker is replaced: what one does before the loop (a download, a data set) may take longer than any hang.
    patient = replace(case.policy, hang_timeout_s=None)
    hang = hanging.look(case.view, condition, case.evidence, case.now_s, patient)
    if hang.gives_up:
        decision = fail(hang.decision.reason)
    elif hang.renews:
        decision = _restart(case, hang.decision.reason)
    else:
        at_loop = record.world_size - len(before)
        decision = Decision(
            None,
            f"before the loop: {at_loop} of {counted(record.world_size, 'worker')} of generation {record.number} at "
            f"the first step; awaiting {some(_name(m) for m in before)}",
        )
        if hang.order is not None:
            decision = replace(decision, reason=f"{hang.order.reason}; {decision.reason}")
    return replace(decision, hang_order=hang.order, wake_at_s=earlier(decision.wake_at_s, hang.wake_at_s))


def _who_is_missing(case: Case) -> Decision | None:
    """Decides what the absence of members, or the suspicion of it, calls for; None: all of them are there."""
    condition, now_s = case.condition, case.now_s
    gone = (*condition.lost, *condition.newcomers_gone)
    if gone:
        return _restart(case, f"{lost(case.view, case.evidence, gone)} before the first step")
    inquiry = inquire(case.view, condition, case.evidence, now_s, case.policy)
    if not inquiry.settled:
        return asking(case, inquiry)
    if inquiry.broken:
        return _broken(case)
    if condition.missing:
        # They ended with 0, and so may the others; or they put their keys again in a moment.
        wake_s = (
            condition.missing_until_s if condition.missing and now_s < condition.missing_until_s else None
        )
        return Decision(
            None, f"waiting: {named(case.view, condition.missing)} gone before the first step", wake_s
        )
    return None


def _broken(case: Case) -> Decision:
    """Decides what follows when a communicator is broken and all live: the cohort starts again, each time later, in the
    end without a node."""
    attempts, policy = case.view.attempts, case.policy
    broken = named(case.view, [s.worker_id for s in case.condition.suspicions if s.broken])
    why = f"the communicator of {broken} is broken and all members live (attempt {attempts.count + 1})"
    wait_s = delay_s(attempts.count, policy.rebuild_first_delay_s, policy.rebuild_longest_delay_s)
    again_s = attempts.newest_since_s + wait_s
    if case.now_s < again_s:
        return Decision(None, f"waiting before the first workers start again: {why}", again_s)
    if attempts.count >= policy.rebuilds_before_leaving_out:
        for option in trouble.of_survivors(case.view, case.condition, case.evidence):
            if _remain(case, option) >= case.desired.min_nodes:
                decision = _restart(case, f"{why}; {option.why}")
                return replace(
                    decision,
                    leaves_out=tuple(sorted(option.agent_ids)),
                    leaves_out_why=f"{option.why}; {why}",
                )
    return _restart(case, why)


def _remain(case: Case, option: ExclusionOption) -> int:
    return len({s.agent_id for s in case.condition.survivors} - set(option.agent_ids))


def _restart(case: Case, why: str, *, again: bool | None = None) -> Decision:
    """Returns the decision that the first workers start again. again: by default what the record says."""
    record = case.view.generation
    if again is None:
        again = record is not None and record.again
    return written(
        case, GenerationKind.GATHERING, (), 0, f"the first workers start again: {why}", again=again
    )


def _enters(case: Case, placement: Placement) -> Chosen:
    """Returns the member in the first generation. Its order is the record's: a key that was put again has a later
    revision."""
    return Chosen(
        worker_id=placement.worker_id,
        agent_id=placement.agent_id,
        node_name=placement.node_name,
        slot=placement.slot,
        topology=case.view.agents[placement.agent_id].topology,
        store_address=case.condition.present[placement.worker_id].store_address,
        since_generation=targets.next_number(case.view),
        join_revision=placement.join_revision,
        holder=False,
        replica=case.condition.present[placement.worker_id].replica,
    )


def _name(placement: Placement) -> str:
    return f"global rank {placement.global_rank} on {placement.node_name}"
