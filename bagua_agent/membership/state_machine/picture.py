"""Applies events to the picture. Contains no rule: the consequences of a change are decided elsewhere.

Stale and repeated events are ordinary and ignored with a reason; what cannot be raises IllegalEvent.
"""

from __future__ import annotations

from dataclasses import replace

from bagua_agent.base.errors import InternalError
from bagua_agent.membership import events as ev
from bagua_agent.membership.failures.detection import judge_probe
from bagua_agent.membership.hang import HangOrder, HangOutcome, wait_began_s
from bagua_agent.membership.job_condition import in_force
from bagua_agent.membership.replica_groups import lists_whole_replicas
from bagua_agent.membership.state_machine.batch import Batch
from bagua_agent.membership.view import (
    AgentView,
    Attempts,
    DeadAgent,
    Desired,
    EndedBeforeJoining,
    Evidence,
    JobView,
    MemberView,
    ProbeVerdict,
    ReplicaView,
    SuspicionView,
)
from bagua_contract.records import Generation, GenerationKind, SuspicionKind

_RECORDS_KEPT = 64


class IllegalEvent(InternalError):
    """Raised for an event that contradicts the picture in a way that neither delay nor loss explains."""


def absorb(
    view: JobView, evidence: Evidence, event: ev.Event, next_sequence: int, batch: Batch | None = None
) -> tuple[JobView, Evidence, str]:
    """Returns the picture that knows of `event`; the string says why it was ignored, if it was.

    next_sequence: no question with this sequence or a later one was asked so far. batch: the one that `event` is of;
    None: a batch of its own. Only the last picture of a batch may be used.
    """
    batch = batch or Batch()
    match event:
        case ev.GenerationSeen():
            seen, note = _generation(view, event.generation)
            if not note:
                attempts = _attempts(view, evidence, event.generation, event.now_s)
                seen = replace(seen, attempts=attempts, went_on={})
                if view.generation is None or view.generation.node_count != event.generation.node_count:
                    seen = replace(seen, resized_since_s=event.now_s)
            return seen, evidence, note
        case ev.AgentGone():
            # what was learned of it was about the key that is gone
            evidence = replace(
                evidence,
                dead_agents=batch.without(evidence.dead_agents, event.agent_id),
                alive_agents=batch.without(evidence.alive_agents, event.agent_id),
                probes=batch.without(evidence.probes, event.agent_id),
                doubted_agents=batch.without(evidence.doubted_agents, event.agent_id),
            )
            return _agent_gone(view, event.agent_id, batch), evidence, ""
        case ev.AgentDoubted():
            doubted = batch.having(evidence.doubted_agents, event.agent_id, event.now_s)
            return view, replace(evidence, doubted_agents=doubted), ""
        case ev.ProbeAnswered():
            evidence, note = _answer(view, evidence, event, next_sequence, batch)
            return view, evidence, note
        case _:
            return _key(view, event, batch), evidence, ""


def _key(view: JobView, event: ev.Event, batch: Batch) -> JobView:
    match event:
        case ev.AgentSeen():
            agent = _agent(view, event.agent, event.now_s)
            agents = batch.having(view.agents, agent.agent_id, agent)
            return replace(view, agents=agents, gone=batch.without(view.gone, agent.agent_id))
        case ev.MemberReady():
            member = _member(view, event.member, event.now_s)
            view = replace(view, members=batch.having(view.members, member.worker_id, member))
            newer = member.committed_generation > view.committed_generation
            return _committed(view, member.committed_generation) if newer else view
        case ev.MemberGone():
            return replace(view, members=batch.without(view.members, event.worker_id))
        case ev.MemberRefused():
            return replace(view, refused=batch.including(view.refused, event.worker_id))
        case ev.SuspicionRaised():
            suspicion = _suspicion(view, event.suspicion, event.now_s)
            return replace(view, suspicions=batch.having(view.suspicions, suspicion.worker_id, suspicion))
        case ev.SuspicionCleared():
            # also that of a worker which is gone; its time is read only while it is a member
            went_on = batch.having(view.went_on, event.worker_id, event.now_s)
            return replace(view, suspicions=batch.without(view.suspicions, event.worker_id), went_on=went_on)
        case ev.HangOrderSeen():
            return _ordered(view, event.order, event.now_s)
        case ev.FailureRecorded():
            worker_id = event.failure.worker_id
            known = view.failures.get(worker_id)
            failure = replace(event.failure, seen_since_s=known.seen_since_s if known else event.now_s)
            return replace(view, failures=batch.having(view.failures, worker_id, failure))
        case ev.WorkerFinished() if event.generation:
            # Apart from those of a live job: one that became live has to run its script anew.
            return replace(view, finished_restarted=batch.including(view.finished_restarted, event.worker_id))
        case ev.WorkerFinished():
            steps = batch.having(view.finished_steps, event.worker_id, event.step)
            their_agents = batch.having(view.finished_agents, event.worker_id, event.agent_id)
            view = replace(
                view,
                finished=batch.including(view.finished, event.worker_id),
                finished_steps=steps,
                finished_agents=their_agents,
            )
            if event.before_joining and event.worker_id not in view.ended_before_joining:
                early = EndedBeforeJoining(event.agent_id, event.node_name, event.now_s)
                view = replace(
                    view, ended_before_joining=batch.having(view.ended_before_joining, event.worker_id, early)
                )
            return view
        case ev.WorkerDeparted():
            departed = event.departure
            return replace(view, departures=batch.having(view.departures, departed.worker_id, departed))
        case ev.DesiredChanged():
            return replace(view, desired=Desired(event.min_nodes, event.max_nodes))
        case ev.SettingsPinned():
            return replace(view, pinned_settings=event.settings, forgets=event.forgets)
        case ev.SettingsTuned():
            return replace(view, tuned_settings=event.settings)
        case ev.ModeSeen():
            view = replace(view, size_policy=event.size_policy, replica_size=event.replica_size)
            return _in_mode(view, event.restarts)
        case ev.ReplicaSeen():
            seen = ReplicaView(event.replica, event.order)
            return replace(view, replicas=batch.having(view.replicas, event.replica.replica_id, seen))
        case ev.ReplicaGone():
            return replace(view, replicas=batch.without(view.replicas, event.replica_id))
        case ev.ClosingSeen():
            return replace(view, closing_generation=event.generation)
        case _:
            raise IllegalEvent(f"no picture changes by {type(event).__name__}")


def _agent_gone(view: JobView, agent_id: str, batch: Batch) -> JobView:
    last, record = view.agents.get(agent_id), view.generation
    view = replace(view, agents=batch.without(view.agents, agent_id))
    # Before the first record it may be one that is done.
    kept = (m.agent_id for m in record.members) if record is not None else view.finished_agents.values()
    if last is None or agent_id not in kept:
        return view
    return replace(view, gone=batch.having(view.gone, agent_id, last))


def _agent(view: JobView, agent: AgentView, now_s: float) -> AgentView:
    """Returns `agent` with the times since which it is ready and its run is unchanged. The times of another key of its
    id say nothing."""
    known = view.agents.get(agent.agent_id)
    if known is None or known.join_revision != agent.join_revision:
        return replace(agent, ready_since_s=now_s, run_since_s=now_s)
    same_run = (known.run_generation, known.run) == (agent.run_generation, agent.run)
    return replace(
        agent,
        ready_since_s=known.ready_since_s if known.ready else now_s,
        run_since_s=known.run_since_s if same_run else now_s,
    )


def _in_mode(view: JobView, restarts: bool) -> JobView:
    """Returns the picture of a job in that mode. To a live job a record of restart mode means only that its number is
    used."""
    record = view.generation
    if restarts or record is None or record.kind is not GenerationKind.RESTART:
        return replace(view, restarts=restarts)
    return replace(view, restarts=False, generation=None, earlier=(), replaced_number=record.number)


def _member(view: JobView, member: MemberView, now_s: float) -> MemberView:
    known = view.members.get(member.worker_id)
    same = known is not None and known.join_revision == member.join_revision and known.stage is member.stage
    return replace(member, ready_since_s=known.ready_since_s if known is not None and same else now_s)


def _suspicion(view: JobView, told: SuspicionView, now_s: float) -> SuspicionView:
    known = view.suspicions.get(told.worker_id)
    if known is None or known.generation != told.generation:
        since_s = wait_began_s(now_s, told.waited_s)
        return replace(told, seen_since_s=now_s, broken_since_s=now_s, waiting_since_s=since_s)
    return replace(
        told,
        seen_since_s=known.seen_since_s if known.sequence == told.sequence else now_s,
        broken_since_s=known.broken_since_s if known.broken else now_s,
        waiting_since_s=_waiting_since_s(known, told, now_s),
    )


def _waiting_since_s(known: SuspicionView, told: SuspicionView, now_s: float) -> float:
    # What is said of one wait only grows. A copy that moves is reported as a new wait of 0 s each time.
    grows = known.waited_s < told.waited_s or known.sequence == told.sequence
    goes_on = not known.broken and grows
    return known.waiting_since_s if goes_on else wait_began_s(now_s, told.waited_s)


def _ordered(view: JobView, order: HangOrder | None, now_s: float) -> JobView:
    if order == view.hang_order:
        return view  # put again
    before, after = _replaced_by(view.hang_order), _replaced_by(order)
    # Those of both orders were counted with the one before. An order's workers are killed only once their stacks are
    # saved, so some come back before that.
    spared = sum(_goes_on(view, worker_id, generation) for generation, worker_id in before - after)
    replacements = max(0, view.replacements - spared) + len(after - before)
    return replace(view, hang_order=order, hang_order_since_s=now_s, replacements=replacements)


def _goes_on(view: JobView, worker_id: str, generation: int) -> bool:
    """Tells whether a worker that was to be replaced lives and has come to the others' collective since the order."""
    if worker_id not in view.members:
        return False
    told = view.suspicions.get(worker_id)
    waits = told is not None and told.kind is SuspicionKind.STALLED and told.generation == generation
    return waits or view.went_on.get(worker_id, float("-inf")) >= view.hang_order_since_s


def _replaced_by(order: HangOrder | None) -> frozenset[tuple[int, str]]:
    """Returns the workers that `order` replaces, each with the generation in which it hangs."""
    if order is None or order.outcome is not HangOutcome.REPLACE:
        return frozenset()
    return frozenset((order.generation, worker_id) for worker_id in order.workers)


def _committed(view: JobView, number: int) -> JobView:
    """Returns the picture after a worker committed in `number`, the newest so far: no attempt at that generation has
    failed."""
    works = view.generation is not None and number >= view.generation.number
    attempts = replace(view.attempts, count=0) if works else view.attempts
    replacements = 0 if works else view.replacements
    return _forget(replace(view, committed_generation=number, attempts=attempts, replacements=replacements))


def _attempts(view: JobView, evidence: Evidence, new: Generation, now_s: float) -> Attempts:
    """Counts `new` if it tries again what the record before did not bring about. view: before `new`."""
    known, count = view.generation, view.attempts.count
    again = known is not None and known.members and new.members and _all_live(view, evidence, known)
    if new.kind is GenerationKind.GATHERING and not new.members and known is not None and known.members:
        # the first workers start again, though all of them live
        return Attempts(count + 1 if _all_live(view, evidence, known) else count, now_s)
    if known is not None and again:
        was_pending = known.kind is GenerationKind.PLANNED and known.base > 0
        if new.kind is GenerationKind.FAILOVER:
            count = 1 if was_pending else count + 1
        elif was_pending and view.committed_generation < known.number:
            count += 1
    return Attempts(count, now_s)


def _all_live(view: JobView, evidence: Evidence, record: Generation) -> bool:
    """Tells whether no member of `record` is known to be gone."""
    return all(
        m.worker_id in view.members
        and m.worker_id not in view.failures
        and m.worker_id not in view.finished
        and m.worker_id not in evidence.dead_workers
        and m.agent_id in view.agents
        and not evidence.is_dead(view.agents[m.agent_id])
        for m in record.members
    )


def _generation(view: JobView, generation: Generation) -> tuple[JobView, str]:
    known = view.generation
    if generation.nonce != view.nonce:
        return view, f"ignored: generation {generation.number} is of another job"
    if generation.kind is GenerationKind.RESTART and not view.restarts:
        return replace(view, replaced_number=generation.number), "ignored: the job has become live"
    if known is not None and generation.number < known.number:
        return view, f"ignored: generation {generation.number} is older than {known.number}"
    if known is not None and generation.number == known.number:
        if generation != known:
            # No leader writes a number twice: a stranger did, and the members follow the one they know.
            return view, f"ignored: another record of generation {generation.number} than the one in force"
        return view, f"ignored: generation {generation.number} is known"
    if not lists_whole_replicas(generation, view.replica_size):
        return (
            view,
            f"ignored: generation {generation.number} does not list whole replicas of {view.replica_size}",
        )
    earlier = view.earlier if known is None else (*view.earlier, known)
    inside = {m.agent_id for m in generation.members}
    gone = {agent_id: agent for agent_id, agent in view.gone.items() if agent_id in inside}
    return _forget(replace(view, generation=generation, earlier=earlier, gone=gone)), ""


def _forget(view: JobView) -> JobView:
    """Drops the records that can neither be in force nor say which workers hold the state."""
    record = view.generation
    if record is None or not view.earlier:
        return view
    holds_none = record.kind is GenerationKind.GATHERING
    needed = in_force(view, record) if record.members or holds_none else record.base
    kept = tuple(g for g in view.earlier if g.number >= needed)
    if len(kept) > _RECORDS_KEPT:
        # the first may be in force; a generation that was tried in vain for hours must not fill the memory
        kept = (kept[0], *kept[1 - _RECORDS_KEPT :])
    return replace(view, earlier=kept)


def _answer(
    view: JobView, evidence: Evidence, event: ev.ProbeAnswered, next_sequence: int, batch: Batch
) -> tuple[Evidence, str]:
    if event.sequence >= next_sequence:
        raise IllegalEvent(f"an answer to question {event.sequence}, which was never asked")
    probe = evidence.probes.get(event.agent_id)
    if probe is None or probe.sequence != event.sequence:
        return evidence, f"ignored: {event.agent_id} answered question {event.sequence}, which is settled"
    probe = replace(probe, relayed=event.verdict) if event.relayed else replace(probe, direct=event.verdict)
    relay = view.agents.get(probe.relay_agent_id)
    judged = judge_probe(probe, "the leader", "" if relay is None else relay.node_name)
    if judged is None:
        return replace(evidence, probes=batch.having(evidence.probes, probe.agent_id, probe)), ""
    verdict, how = judged
    evidence = replace(evidence, probes=batch.without(evidence.probes, probe.agent_id))
    if verdict is ProbeVerdict.ALIVE:
        alive = batch.having(evidence.alive_agents, probe.agent_id, probe.asked_at_s)
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
    return replace(evidence, dead_agents=batch.having(evidence.dead_agents, probe.agent_id, dead)), ""
