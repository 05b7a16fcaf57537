"""The leader as a state machine: the consequences of each event.

Every agent keeps the state up to date, so that a new leader knows the picture; only the leader acts. Owns the memory
between decisions: the picture, evidence, and actions that the shell has not answered yet. No IO and no clock: time
arrives inside events. Invariants: no action from an agent that does not lead; at most one WriteGeneration is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bagua_agent.base.errors import InternalError
from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import (
    Action,
    AskWhetherAlive,
    Decision,
    ProbeAgents,
    Question,
    RefuseMember,
    RemoveDeadAgent,
    WakeAt,
    WriteGeneration,
    WriteHangOrder,
    WriteReplicas,
    WriteResult,
)
from bagua_agent.membership.exclusion import quarantined
from bagua_agent.membership.failures.detection import relays_for
from bagua_agent.membership.formation.admission import misfits
from bagua_agent.membership.formation.decision import decide
from bagua_agent.membership.formation.replicas import decide_replicas
from bagua_agent.membership.hang import HangOrder
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.state_machine.batch import Batch
from bagua_agent.membership.state_machine.picture import IllegalEvent, absorb
from bagua_agent.membership.state_machine.restarting import decide_restart
from bagua_agent.membership.view import Evidence, JobView, Probe
from bagua_contract.replica import Replica

_REMEMBERED_EVENTS = 16
_REPLICAS_AT_ONCE = 64  # half of what a transaction of etcd takes


class IllegalTransition(InternalError):
    """Raised for an event that cannot follow this state: our bug. Carries the event and what came before it."""

    def __init__(self, why: str, event: ev.Event, state: State) -> None:
        story = "\n".join(f"  {e!r}" for e in state.recent)
        super().__init__(f"{why}\nevent: {event!r}\nleading: {state.leading}\nbefore, oldest first:\n{story}")
        self.event = event
        self.recent = state.recent


@dataclass(frozen=True, slots=True)
class State:
    """The picture, the evidence, and the actions that the shell has not answered yet. Make it with `new_state`.

    writing: number of the generation whose write is under way. writing_result: a result is. ended: there is a result.
    refusal: the last write was refused, so the next one waits. refusing: workers whose refusal was asked for, with the
    time. removals: dead agents, likewise. ordering: the hang order whose write was asked for, likewise. replicas:
    records whose write or removal (None) was asked for, likewise, by id. wake_at_s: last WakeAt.
    """

    view: JobView
    evidence: Evidence
    leading: bool = False
    writing: int | None = None
    writing_result: bool = False
    refusal: ev.GenerationWriteRefused | ev.ResultWriteRefused | None = None
    ended: bool = False
    refusing: Mapping[str, float] = field(default_factory=dict)
    removals: Mapping[tuple[str, int], float] = field(default_factory=dict)
    ordering: tuple[HangOrder | None, float] | None = None
    replicas: Mapping[str, tuple[Replica | None, float]] = field(default_factory=dict)
    wake_at_s: float | None = None
    next_sequence: int = 1
    now_s: float = float("-inf")
    recent: tuple[ev.Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Transition:
    """The result of an event: the new state and the actions. reason: why these actions, or why none."""

    state: State
    actions: tuple[Action, ...]
    reason: str


def new_state(
    agent_id: str,
    nonce: str = "",
    *,
    has_checkpoints: bool = False,
    restarts: bool = False,
    replica_size: int = 1,
) -> State:
    view = JobView(nonce=nonce, has_checkpoints=has_checkpoints, restarts=restarts, replica_size=replica_size)
    return State(view, Evidence(observer_agent_id=agent_id))


def step(state: State, event: ev.Event, policy: Policy) -> Transition:
    """Returns the state after `event`, and the actions. Raises IllegalTransition for an event that our own code cannot
    have meant."""
    return step_all(state, (event,), policy)


def step_all(state: State, happened: Iterable[ev.Event], policy: Policy) -> Transition:
    """Applies several events as `step` does, but decides once after all of them: for the first reading of the store,
    and for bursts."""
    note, batch = "", Batch()
    for event in happened:
        state, note = _absorb(state, event, batch)
    if not state.leading:
        return Transition(state, (), note or "another agent leads")
    if state.ended:
        return Transition(state, (), note or "the job has ended")
    return _act(state, note, policy)


def _absorb(state: State, event: ev.Event, batch: Batch) -> tuple[State, str]:
    """Returns the state that knows of `event`, and why it was ignored, if it was."""
    if event.now_s < state.now_s:
        raise IllegalTransition(f"time went back from {state.now_s}", event, state)
    before = state
    state = replace(state, now_s=event.now_s, recent=(*state.recent, event)[-_REMEMBERED_EVENTS:])
    match event:
        case ev.LeadershipWon():
            if state.leading:
                raise IllegalTransition("elected while leading", event, before)
            evidence = replace(
                state.evidence,
                elected_at_s=event.now_s,
                alive_agents={},
                probes={},
                doubted_agents={},
                waiting=None,
            )
            return replace(state, leading=True, evidence=evidence), ""
        case ev.LeadershipLost():
            if not state.leading:
                raise IllegalTransition("lost a leadership that we did not have", event, before)
            # Answers to what is under way may still come; they will be stale.
            idle = replace(state, leading=False, writing=None, writing_result=False, refusal=None)
            return replace(idle, wake_at_s=None, refusing={}, removals={}, ordering=None, replicas={}), ""
        case ev.GenerationWriteRefused():
            if state.writing != event.number:
                if state.leading and state.writing is None and not _is_answered(state, event.number):
                    raise IllegalTransition("no such write was under way", event, before)
                return state, f"ignored: answer to an earlier write of generation {event.number}"
            return replace(state, writing=None, refusal=event), ""
        case ev.ResultWriteRefused():
            return replace(state, writing_result=False, refusal=event), ""
        case ev.ResultSeen():
            return replace(state, ended=True, writing=None, writing_result=False), ""
        case ev.TimePassed():
            return state, ""
        case _:
            pass
    try:
        view, evidence, note = absorb(state.view, state.evidence, event, state.next_sequence, batch)
    except IllegalEvent as error:
        raise IllegalTransition(str(error), event, before) from error
    if view.generation is not state.view.generation:
        # whichever agent wrote it, the refusal is explained
        state = replace(state, refusal=None)
    state = replace(state, view=view, evidence=evidence)
    if state.writing is not None and view.generation_number >= state.writing:
        state = replace(state, writing=None)
    return state, note


def _is_answered(state: State, number: int) -> bool:
    """Tells whether this agent may have asked for a write of that number, in this or an earlier leadership."""
    return number <= state.view.generation_number + 1


def _act(state: State, note: str, policy: Policy) -> Transition:
    actions: list[Action] = []
    state, refuse_again_s = _refuse_misfits(state, actions, policy)
    state, remove_again_s = _remove_dead(state, actions, policy)
    state, replicas_again_s, changes = _replicas(state, policy)
    retries_s = [t for t in (refuse_again_s, remove_again_s, replicas_again_s) if t is not None]
    if state.writing is not None or state.writing_result:
        what = "the result" if state.writing_result else f"generation {state.writing}"
        actions += changes
        state = _wake(state, min(retries_s, default=None), actions)
        return Transition(state, tuple(actions), f"waiting: {what} is being written")
    decide_now = decide_restart if state.view.restarts else decide
    decision = decide_now(state.view, state.evidence, state.now_s, policy)
    if state.refusal is not None and isinstance(decision.action, WriteGeneration | WriteResult):
        # At once again would be a busy loop while the store is away.
        again_s = state.refusal.now_s + policy.write_retry_s
        if state.now_s < again_s:
            decision = replace(
                decision,
                action=None,
                reason=f"the store refused the last write ({state.refusal.why}), then: {decision.reason}",
                wake_at_s=again_s,
            )
    state, order_again_s = _order(state, decision.hang_order, actions, policy)
    if order_again_s is not None:
        retries_s.append(order_again_s)
    evidence = state.evidence
    if decision.waiting is not evidence.waiting:
        evidence = replace(evidence, waiting=decision.waiting, waiting_since_s=state.now_s)
        state = replace(state, evidence=evidence)
    if decision.wake_at_s is not None:
        retries_s.append(decision.wake_at_s)
    match decision.action:
        case WriteGeneration() as write:
            actions.append(write)
            evidence = replace(
                state.evidence,
                quarantines=quarantined(
                    state.evidence.quarantines,
                    decision.leaves_out,
                    decision.leaves_out_why,
                    state.now_s,
                    policy,
                ),
            )
            state = replace(state, evidence=evidence)
            state = replace(state, refusal=None, writing=write.generation.number)
        case WriteResult() as write:
            actions.append(write)
            state = replace(state, refusal=None, writing_result=True)
        case AskWhetherAlive(agent_ids):
            state = _ask(state, agent_ids, actions)
            retries_s.append(state.now_s + 2 * policy.probe_window_s)
        case None:
            pass
    # after the generation, for which the survivors wait
    actions += changes
    state = _wake(state, min(retries_s, default=None), actions)
    return Transition(state, tuple(actions), _reason(note, decision))


def _wake(state: State, wake_at_s: float | None, actions: list[Action]) -> State:
    # one that is due has rung, or will in a moment: it is no promise any more
    if wake_at_s is not None and (wake_at_s != state.wake_at_s or state.wake_at_s <= state.now_s):
        actions.append(WakeAt(wake_at_s))
    return replace(state, wake_at_s=wake_at_s)


def _reason(note: str, decision: Decision) -> str:
    return f"{note}; {decision.reason}" if note else decision.reason


def _refuse_misfits(state: State, actions: list[Action], policy: Policy) -> tuple[State, float | None]:
    """Requests the refusal of each misfit until it is in the store; also returns when to request it again."""
    refusing: dict[str, float] = {}
    for worker_id, what in sorted(misfits(state.view).items()):
        asked_at_s = state.refusing.get(worker_id)
        if asked_at_s is None or state.now_s >= asked_at_s + policy.refusal_retry_s:
            actions.append(RefuseMember(worker_id, what))
            asked_at_s = state.now_s
        refusing[worker_id] = asked_at_s
    again_s = min(refusing.values()) + policy.refusal_retry_s if refusing else None
    return replace(state, refusing=refusing), again_s


def _order(
    state: State, order: HangOrder | None, actions: list[Action], policy: Policy
) -> tuple[State, float | None]:
    """Requests the write of `order` until it is in the store; also returns when to request it again."""
    if order == state.view.hang_order:
        return replace(state, ordering=None), None
    asked = state.ordering
    if asked is None or not _same_order(asked[0], order) or state.now_s >= asked[1] + policy.refusal_retry_s:
        actions.append(WriteHangOrder(order))
        asked = (order, state.now_s)
    return replace(state, ordering=asked), asked[1] + policy.refusal_retry_s


def _same_order(one: HangOrder | None, other: HangOrder | None) -> bool:
    """Tells whether two orders are the same but for the reason, which tells a time."""
    if one is None or other is None:
        return one is other
    return (one.generation, one.outcome, one.workers) == (other.generation, other.outcome, other.workers)


def _replicas(state: State, policy: Policy) -> tuple[State, float | None, list[Action]]:
    """Requests the writes of records of replicas until they are in the store; also returns when to request them again.
    A record that shares a worker with another whose write may still succeed waits for that."""
    due = decide_replicas(state.view, state.evidence, state.now_s, policy)
    recent = {
        replica_id: asked
        for replica_id, asked in state.replicas.items()
        if state.now_s < asked[1] + policy.refusal_retry_s
    }
    wanted: dict[str, Replica | None] = {r.replica_id: r for r in due.over}
    wanted.update(dict.fromkeys(due.forgotten))
    for replica in due.formed:
        held = (other for other, _ in recent.values() if other is not None and not other.over)
        if all(other == replica or not set(other.worker_ids) & set(replica.worker_ids) for other in held):
            wanted[replica.replica_id] = replica
    new = [i for i, r in wanted.items() if i not in recent or not _same_record(recent[i][0], r)]
    left, new = len(new) > _REPLICAS_AT_ONCE, new[:_REPLICAS_AT_ONCE]
    asked = {**recent, **{i: (wanted[i], state.now_s) for i in new}}
    times = [asked_s + policy.refusal_retry_s for i, (_, asked_s) in asked.items() if i in wanted]
    if left:
        times.append(state.now_s + policy.refusal_retry_s)
    if due.next_at_s is not None:
        times.append(due.next_at_s)
    puts = tuple(r for i in new if (r := wanted[i]) is not None)
    gone = tuple(i for i in new if wanted[i] is None)
    changes: list[Action] = [WriteReplicas(puts, gone)] if new else []
    return replace(state, replicas=asked), min(times, default=None), changes


def _same_record(one: Replica | None, other: Replica | None) -> bool:
    """Tells whether two records are the same. Of replicas that are over the reason may differ: it may name more workers
    by now."""
    if one is None or other is None or not (one.over and other.over):
        return one == other
    return one.members == other.members


def _remove_dead(state: State, actions: list[Action], policy: Policy) -> tuple[State, float | None]:
    """Requests the removal of dead agents' keys while these exist; also returns when to request it again."""
    removals: dict[tuple[str, int], float] = {}
    for agent_id in sorted(state.evidence.dead_agents):
        agent = state.view.agents.get(agent_id)
        if agent is None or not state.evidence.is_dead(agent):
            continue
        key = (agent_id, agent.join_revision)
        asked_at_s = state.removals.get(key)
        if asked_at_s is None or state.now_s >= asked_at_s + policy.removal_retry_s:
            actions.append(RemoveDeadAgent(agent_id, agent.join_revision))
            asked_at_s = state.now_s
        removals[key] = asked_at_s
    retry_at_s = min(removals.values()) + policy.removal_retry_s if removals else None
    return replace(state, removals=removals), retry_at_s


def _ask(state: State, agent_ids: tuple[str, ...], actions: list[Action]) -> State:
    view, evidence = state.view, state.evidence
    probes = dict(evidence.probes)
    questions = []
    relays = relays_for(view, evidence, agent_ids)
    for agent_id in agent_ids:
        agent = view.known_agent(agent_id)
        relay_id = relays[agent_id]
        relay_address = view.agents[relay_id].control_address if relay_id else ""
        questions.append(Question(agent_id, agent.control_address, relay_id, relay_address))
        probes[agent_id] = Probe(agent_id, agent.join_revision, state.next_sequence, state.now_s, relay_id)
    actions.append(ProbeAgents(tuple(questions), state.next_sequence))
    return replace(state, evidence=replace(evidence, probes=probes), next_sequence=state.next_sequence + 1)
