"""Decides which generation is written now, if any: rules 1 to 8 of docs/design/membership.md.

Reads the whole picture each time (level-triggered) and keeps no memory, so the order of past events never matters.
The result is an action or a wait, always with a reason that a person can act on.

Invariants: after a first commit no generation without a holder (I6), except an empty one, in which no worker
steps; numbers grow by one (I5); no PLANNED record while another may be pending, unless that one can't come into
force any more, since one of its joiners died or a member could not build it; nodes that stay never exceed the maximum,
and their number is an allowed size (sizes.py).

**Nothing planned before a commit.** A planned generation follows a FAILOVER or first generation, too, only once a
commit in it is known. The store keeps only the newest record: a commit proves that every member has received
it, so no member stays in an older generation because of a record that it never saw.

**Too few nodes would remain.** Workers do not know the minimum, so a generation below it would step. A leave
that brings the job below the minimum therefore writes an empty generation: the leaver goes, the others step
aside at the same boundary, keep their state and wait. Once there are enough nodes again, a FAILOVER generation
contains the workers that kept the state, and the joiners. After a loss nothing is written instead, since
the survivors cannot step anyway, unless one of them wants to leave and waits for a generation without it.

**The last holders leave.** As long as a joiner could take over the state, they stay until it has committed.
Until then they do not count towards the maximum: the state matters more than one extra node for some steps. With
allowed sizes they count (targets.py).

**All live, but the generation does not work.** A generation that breaks, or a pending one that can't be built, is
written again after growing delays, and after some attempts without one of the nodes (exclusion.py). That node is in
quarantine: its workers are offered again after a while, or at once if the minimum can't be met without them.

**Other settings of steps.** A generation carries them (docs/design/autotuning.md). If they alone differ from what is
wanted, a planned generation of the same members follows.

**All members wait.** hang.py decides for which members a step waits. If all wait and connections between them are cut,
or the wait lasts, the same members build a new communicator; if a cut persists, a node is left out at once, since both
ends of the cut name each other.

**No worker holds the state.** If the job has checkpoints, all begin again from the newest: a FAILOVER record with base
0. Its members are all new in it, so any state kept from earlier generations is void.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bagua_agent.base.backoff import delay_s
from bagua_agent.base.plain_text import counted, some
from bagua_agent.base.sizes import AllowedSizes
from bagua_agent.membership.actions import Decision
from bagua_agent.membership.exclusion import ExclusionOption
from bagua_agent.membership.failures import hanging, trouble
from bagua_agent.membership.failures.detection import gathering_until_s, inquire
from bagua_agent.membership.formation import gathering, targets
from bagua_agent.membership.formation.candidates import Offer, readiness
from bagua_agent.membership.formation.case import Case, asking, earlier, too_few, written
from bagua_agent.membership.formation.departure import parting
from bagua_agent.membership.formation.ending import decide_end, fail
from bagua_agent.membership.hang import HangDecision, HangOutcome
from bagua_agent.membership.job_condition import JobCondition, Survivor, job_condition
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import Evidence, JobView, Waiting
from bagua_agent.membership.worker_names import lost, named
from bagua_contract.records import Generation, GenerationKind

# A worker that comes while all have stepped aside asks a few of them; see before_loop.py of the core.
_MOST_ANSWERING = 16


def decide(view: JobView, evidence: Evidence, now_s: float, policy: Policy) -> Decision:
    """Decides what should be done now. Pure: the same picture gives the same decision at every agent."""
    condition = job_condition(view, evidence, now_s, policy)
    if not view.closing:
        disagree = _disagreement(view, condition, now_s, policy)
        if disagree is not None:
            return disagree
    end = decide_end(view, condition, evidence, now_s, policy)
    if end is not None:
        return end
    if view.wanted is None:
        return Decision(None, "waiting: the desired number of nodes is not written yet")
    case = Case(view, view.wanted, condition, evidence, now_s, policy)
    before_loop = gathering.decide(case)
    if before_loop is not None:
        return before_loop
    urgent = _who_is_there(case)
    if urgent is not None:
        return replace(urgent, hang_order=hanging.standing_order(view))
    hang = hanging.look(view, condition, evidence, now_s, policy)
    if hang.gives_up:
        decision = fail(hang.decision.reason)
    elif hang.renews:
        decision = _renewed(case, hang.decision)
    else:
        decision = _who_should_be_there(case)
        if hang.order is not None:
            decision = replace(decision, reason=f"{hang.order.reason}; {decision.reason}")
    return replace(decision, hang_order=hang.order, wake_at_s=earlier(decision.wake_at_s, hang.wake_at_s))


def _disagreement(view: JobView, condition: JobCondition, now_s: float, policy: Policy) -> Decision | None:
    """Returns the end of a job whose ranks disagree, or the wait for it: no generation would help. None: as far as is
    known they don't."""
    order = hanging.standing_order(view)
    if order is not None and order.outcome is HangOutcome.DISAGREE:
        due_s = view.hang_order_since_s + policy.stacks_first_s
        if now_s < due_s:
            return Decision(None, order.reason, due_s, hang_order=order)
        return replace(fail(order.reason), hang_order=order)
    early = hanging.ended_early(view, condition, now_s, policy)
    if early is None:
        return None
    return Decision(None, early.decision.reason, early.wake_at_s, hang_order=early.order)


def _who_is_there(case: Case) -> Decision | None:
    """Decides what the absence of members, or the suspicion of it, calls for; None: no member is lost, and all that
    were suspected live."""
    view, condition, evidence = case.view, case.condition, case.evidence
    record = view.generation
    if not condition.survivors if record is None else _never_trained(view, record):
        return _first(case)
    if condition.lost:
        why = lost(view, evidence, condition.lost)
        wait_s = gathering_until_s(view, condition, evidence, case.now_s, case.policy)
        if wait_s is not None:
            return Decision(None, f"{why}; asking whether others are too", wait_s)
        return _at_once(case, why, broken=True)
    inquiry = inquire(view, condition, evidence, case.now_s, case.policy)
    if not inquiry.settled:
        return asking(case, inquiry)
    if inquiry.broken:
        broken = named(view, [s.worker_id for s in condition.suspicions if s.broken])
        return _made_again(case, f"the communicator of {broken} is broken and all members live")
    return None


def _who_should_be_there(case: Case) -> Decision:
    """Decides what joins, leaves and wishes call for, while the generation in force works as far as is reported."""
    view, condition, now_s = case.view, case.condition, case.now_s
    record = view.generation
    if record is None:
        # etcd lost its keys: the members of one generation put theirs again within moments
        again_s = max(m.ready_since_s for m in condition.present.values()) + case.policy.last_call_s
        if now_s < again_s:
            return Decision(None, "waiting: the record is lost, members come back", again_s)
        return _at_once(case, "the record was lost", broken=False)
    if not record.members:
        return _at_once(case, "after all stepped aside", broken=False)
    if condition.unbuilt and not condition.newcomers_gone and not condition.missing:
        return _built_again(case, record)
    if view.committed_generation < record.number and not condition.newcomers_gone:
        # The end of the grace after an election changes who counts as lost, and nothing else may happen by then.
        wake_s = (
            condition.missing_until_s if condition.missing and now_s < condition.missing_until_s else None
        )
        return Decision(None, f"waiting: no worker has committed in generation {record.number} yet", wake_s)
    if condition.missing:
        # They ended with 0 and so will the others; or they may be back in a moment. A planned change without
        # them would never be brought by all, and if a worker misses them, a suspicion reports it.
        wake_s = condition.missing_until_s if now_s < condition.missing_until_s else None
        return Decision(
            None, f"waiting: {named(view, condition.missing)} gone and no worker suspects them", wake_s
        )
    return _planned(case, record)


def _never_trained(view: JobView, record: Generation) -> bool:
    """Tells whether all of a first generation failed in its first step, so that there is no state to wait for."""
    ends = [view.failures.get(m.worker_id) for m in record.members]
    return record.base == 0 and all(f is not None and f.in_step and f.step == 0 for f in ends)


def _first(case: Case) -> Decision:
    """Decides on the first generation (rule 1)."""
    if gathering.is_called_for(case):
        return gathering.gather(case, "", again=False)
    least, most = case.least_to_start, case.desired.max_nodes
    waiters = case.offers(())
    complete, soon_s = waiters.ready, waiters.soon_s
    if len(complete) < least:
        complete = waiters.every
    if len(complete) < least:
        return too_few(case, len(complete), soon_s, least=least)
    # counted anew from each arrival: nodes of one start come in a stream
    last_call_until_s = max(o.complete_at_s for o in complete) + case.policy.last_call_s
    if len(complete) < most and case.now_s < last_call_until_s:
        wake_s = last_call_until_s if soon_s is None else min(soon_s, last_call_until_s)
        return Decision(None, f"last call: {len(complete)} of at most {counted(most, 'node')} ready", wake_s)
    size = case.room.fit(len(complete))
    chosen = targets.first(case.view, complete, size)
    # base 0: it follows nothing, so no worker has to bring a state
    return written(case, GenerationKind.PLANNED, chosen, 0, f"{counted(size, 'node')} ready")


def _at_once(case: Case, why: str, *, broken: bool) -> Decision:
    """Decides on a FAILOVER generation of the survivors, with newcomers only where they are too few.

    broken: a member cannot go on; else all members wait already (the record is empty, or lost).
    """
    view, condition, record = case.view, case.condition, case.view.generation
    waiters = case.offers(s.worker_id for s in condition.survivors)
    for ready in (waiters.ready, waiters.every):
        target = targets.survivors(view, case.desired, condition, ready)
        if _may_be_written(case, target):
            return written(case, GenerationKind.FAILOVER, target.workers, _base(case), why)
    leaver = next((s for s in condition.survivors if view.agents[s.agent_id].leaving), None)
    # Whether workers are bound to a generation that they cannot step in: they leave by a record without them.
    planned = record is not None and record.kind is GenerationKind.PLANNED
    bound = record is not None and (bool(record.members) or (broken and planned))
    if leaver is not None and bound:
        why = f"{why}; too few nodes remain and {leaver.node_name} wants to leave"
        return _empty(case, GenerationKind.FAILOVER, why)
    if not target.has_holder:
        return _no_holder(case, why)
    if record is not None and not record.members and _answered_by_others(case, record):
        return _empty(case, GenerationKind.FAILOVER, f"{why}; other workers answer those that come later")
    return too_few(case, target.nodes, waiters.soon_s, f"; {why}")


def _answered_by_others(case: Case, record: Generation) -> bool:
    """Tells whether workers wait before their loops for answers of workers that are gone, and others can give these."""
    found = {case.condition.present[s.worker_id].store_address for s in _keepers(case)}
    return gathering.is_called_for(case) and bool(found) and found.isdisjoint(record.answers_at)


def _may_be_written(case: Case, target: targets.Target) -> bool:
    return target.has_holder and target.nodes >= targets.least_nodes(case.view, case.desired, case.condition)


def _made_again(case: Case, why: str) -> Decision:
    """Decides when a broken generation is made again with the same members, since all live: not in a tight loop and not
    forever."""
    view, policy, attempts = case.view, case.policy, case.view.attempts
    # what was tried before this pending record was about its newcomers, and these go now
    failed = 0 if case.condition.pending else attempts.count
    wait_s = delay_s(failed, policy.rebuild_first_delay_s, policy.rebuild_longest_delay_s)
    again_s = attempts.newest_since_s + wait_s
    tried = f"{why} (attempt {failed + 1})" if failed else why
    leaves_out = failed >= policy.rebuilds_before_leaving_out
    if leaves_out:
        # the others report the same break a moment later, and whom they can't reach
        first_s = min(s.broken_since_s for s in case.condition.suspicions if s.broken)
        again_s = max(again_s, first_s + policy.probe_window_s)
    if case.now_s < again_s:
        return Decision(None, f"waiting before generation {view.generation_number + 1}: {tried}", again_s)
    return _without_somebody(case, tried) if leaves_out else _at_once(case, tried, broken=True)


def _renewed(case: Case, hang: HangDecision) -> Decision:
    """Decides on a new communicator when all members live and wait. hang.py has spaced the attempts already."""
    failed = case.view.attempts.count
    tried = f"{hang.reason} (attempt {failed + 1})" if failed else hang.reason
    # A cut that outlasts a new communicator is no accident, and both its ends have said of whom they hear nothing.
    if hang.cut and failed and not case.condition.pending:
        return _without_somebody(case, tried)
    return _at_once(case, tried, broken=True)


def _without_somebody(case: Case, tried: str) -> Decision:
    """Decides on a FAILOVER generation of the survivors without a node that is in trouble, if there is a way to do
    without one."""
    view = case.view
    for option in trouble.of_survivors(view, case.condition, case.evidence):
        waiters = case.offers((s.worker_id for s in case.condition.survivors), without=option.agent_ids)
        for ready in (waiters.ready, waiters.every):
            target = targets.survivors(view, case.desired, case.condition, ready, option.agent_ids)
            if _may_be_written(case, target):
                reason = f"{tried}; {_left_out(case, option)}"
                decision = written(case, GenerationKind.FAILOVER, target.workers, _base(case), reason)
                return replace(
                    decision, leaves_out=tuple(sorted(option.agent_ids)), leaves_out_why=option.why
                )
    return _at_once(case, f"{tried}; no node can be left out", broken=True)


def _built_again(case: Case, record: Generation) -> Decision:
    """Decides on the same target once more, in the end without a newcomer, when the pending record can't come into
    force and the generation before it goes on."""
    view, policy, attempts = case.view, case.policy, case.view.attempts
    wait_s = delay_s(attempts.count + 1, policy.rebuild_first_delay_s, policy.rebuild_longest_delay_s)
    again_s = attempts.newest_since_s + wait_s
    where = some(
        dict.fromkeys(
            view.agents[view.members[s.worker_id].agent_id].node_name for s in case.condition.unbuilt
        )
    )
    tried = f"it could not be built on {where} (attempt {attempts.count + 1})"
    if case.now_s < again_s:
        return Decision(None, f"waiting before generation {record.number} is written again: {tried}", again_s)
    inside = {m.worker_id for m in record.members}
    leaves_out = attempts.count + 1 >= policy.rebuilds_before_leaving_out
    options = trouble.of_newcomers(view, case.condition, case.evidence) if leaves_out else []
    for option in (*options, None):
        without = frozenset() if option is None else option.agent_ids
        waiters = case.offers(inside, without)
        for ready in (waiters.ready, waiters.every):
            target = targets.planned(view, record, case.room, case.condition, ready, without)
            if not _may_be_written(case, target):
                continue
            why = targets.changes(record, target)
            reason = f"{tried}{'; ' + why if why else ''}{'; ' + _left_out(case, option) if option else ''}"
            decision = written(case, GenerationKind.PLANNED, target.workers, _base(case), reason)
            return replace(
                decision,
                leaves_out=tuple(sorted(without)),
                leaves_out_why="" if option is None else f"{option.why}; {tried}",
            )
    return _planned(case, record)


def _left_out(case: Case, option: ExclusionOption) -> str:
    names = some(case.view.agents[a].node_name for a in sorted(option.agent_ids))
    return f"{option.why}, so {names} is left out for a while"


def _planned(case: Case, record: Generation) -> Decision:
    inside = {m.worker_id for m in record.members}
    waiters = case.offers(inside)
    ready, soon_s = waiters.ready, waiters.soon_s
    wanted = targets.planned(case.view, record, case.room, case.condition, ready)
    target, cools = wanted, case.now_s < case.view.cooldown_until_s
    if cools:
        # what is not voluntary, a leave or a worker's replacement, keeps the size or shrinks it
        room = AllowedSizes(record.node_count, case.view.size_policy)
        held = targets.planned(case.view, record, room, case.condition, ready)
        # a change that happens anyway takes a smaller size with it, which saves a second one
        if held.worker_ids == inside or wanted.nodes > record.node_count:
            target = held
    if not _may_be_written(case, target) and waiters.reserve:
        target = targets.planned(case.view, record, case.room, case.condition, waiters.every)
    if target.worker_ids == inside and case.view.settings != record.settings:
        why = f"other settings of steps: {case.view.settings}"
        return written(case, GenerationKind.PLANNED, target.workers, _base(case), why)
    if target.worker_ids == inside:
        back, spare = some(target.held_back), some(o.agent.node_name for o in ready)
        until_s = case.view.cooldown_until_s
        delayed = targets.changes(record, wanted) if cools else ""
        awaits = case.room.awaits(record.node_count, len(ready))
        wait = case.view.size_policy.waits(delayed) if delayed else awaits
        return Decision(
            None,
            wait
            + f"generation {record.number} has {counted(record.world_size, 'worker')}"
            + f" on {counted(record.node_count, 'node')}"
            + (f"; {back} leaves once another node has the state" if back else "")
            + (f"; spare: {spare}" if spare else "")
            + _in_quarantine(case, waiters.reserve),
            earlier(soon_s, until_s) if delayed else soon_s,
        )
    why = targets.changes(record, target)
    if _may_be_written(case, target):
        return written(case, GenerationKind.PLANNED, target.workers, _base(case), why)
    if waiters.next_at_s is not None:
        # a node that is nearly complete may save the job a stop
        return Decision(None, f"waiting for a node to be complete before stopping: {why}", waiters.next_at_s)
    # While another is pending, it is unknown which workers a second planned one reaches, so it is entered at once.
    kind = GenerationKind.FAILOVER if case.condition.pending else GenerationKind.PLANNED
    remain = f"{target.nodes} of at least {counted(case.desired.min_nodes, 'node')} remain, so all step aside"
    return _empty(case, kind, f"{why}; {remain}")


def _in_quarantine(case: Case, reserve: Iterable[Offer]) -> str:
    """Names the nodes of the reserve that are left out. A node of the reserve may be there for another one alone, which
    has a part of its replica."""
    quarantines = case.evidence.quarantines
    parts = [
        f"; {o.agent.node_name} is left out ({quarantine.why})"
        for o in reserve
        if (quarantine := quarantines.get(o.agent.agent_id)) is not None
    ]
    return "".join(parts[:8])


def _base(case: Case) -> int:
    record = case.view.generation
    if record is None:
        return case.view.committed_generation
    # no worker steps in an empty generation: the one that it followed was in force before
    return case.condition.in_force if record.members else record.base


def _empty(case: Case, kind: GenerationKind, reason: str) -> Decision:
    """Returns the decision to write an empty generation. Its base is the record that lists the workers that keep the
    state; see job_condition.py."""
    record = case.view.generation
    base = 0 if record is None else record.number if record.members else record.base
    present = case.condition.present
    answers_at = tuple(present[s.worker_id].store_address for s in _keepers(case)[:_MOST_ANSWERING])
    return written(case, kind, (), base, reason, answers_at=answers_at)


def _keepers(case: Case) -> list[Survivor]:
    """Returns the survivors that hold the state and stay."""
    return [s for s in case.condition.survivors if s.holder and not case.view.agents[s.agent_id].leaving]


def _no_holder(case: Case, why: str) -> Decision:
    """Decides what follows when no holder is there (rule 2)."""
    view, limit_s = case.view, case.policy.holder_timeout_s
    held = {m.worker_id for g in (*view.earlier, view.generation) if g is not None for m in g.members}
    since_s = case.evidence.waited_since_s(Waiting.HOLDER, case.now_s)
    left = parting(view)
    if left is not None:  # no worker will come back with the state, so there is nothing to wait for
        if left.failed and not view.has_checkpoints:
            return fail(f"workers failed while others left ({left.reason})")
        return _begin_again(case, left.reason, case.now_s)
    if held and held <= view.failures.keys():
        why = f"every worker that held the state has ended ({why})"
    elif case.now_s >= since_s + limit_s:
        since_s += limit_s
        why = f"no worker that holds the state came back within {limit_s:g} s ({why})"
    else:
        reason = f"waiting: no worker that holds the state is present ({why})"
        return Decision(None, reason, since_s + limit_s, Waiting.HOLDER)
    return _begin_again(case, why, since_s) if view.has_checkpoints else fail(why)


def _begin_again(case: Case, why: str, since_s: float) -> Decision:
    """Begins the job again from the newest checkpoint, or anew if there are none. All that are there begin again
    together: like a first generation, but taken at once and with a number that goes on, so that every member knows that
    whatever it kept is void. since_s: when that became the only way on."""
    what = "begin again from a checkpoint" if case.view.has_checkpoints else "begin anew"
    least = targets.least_nodes(case.view, case.desired, case.condition)
    waiters = case.offers(())
    complete = waiters.ready
    if len(complete) < least:
        complete = waiters.every
    if len(complete) < least and gathering.is_called_for(case):
        # Those wait for a job to begin or to go on, and it does neither without them.
        decision = gathering.gather(case, f"{what}, since {why}", again=True)
        # still the same wait: forgotten, it would begin anew
        return decision if decision.action is not None else replace(decision, waiting=Waiting.HOLDER)
    if len(complete) < least:
        lacking = readiness(case.view, case.condition.present)
        so_far = f"{len(complete)} of {counted(least, 'node')}{lacking}; {why}"
        limit_s, wake_s = case.policy.below_minimum_timeout_s, waiters.soon_s
        if limit_s is not None and case.now_s >= since_s + limit_s:
            return fail(f"too few nodes for {limit_s:g} s to {what}: {so_far}")
        if limit_s is not None:
            wake_s = earlier(wake_s, since_s + limit_s)
        # still the same wait: forgotten, it would begin anew
        return Decision(None, f"waiting to {what}: {so_far}", wake_s, Waiting.HOLDER)
    last_call_until_s = max(o.complete_at_s for o in complete) + case.policy.last_call_s
    if len(complete) < case.desired.max_nodes and case.now_s < last_call_until_s:
        reason = f"waiting to {what}: last call; {why}"
        return Decision(None, reason, last_call_until_s, Waiting.HOLDER)
    chosen = targets.first(case.view, complete, case.room.fit(len(complete)))
    start = "from the newest checkpoint" if case.view.has_checkpoints else "anew"
    return written(case, GenerationKind.FAILOVER, chosen, 0, f"{start}, since {why}")
