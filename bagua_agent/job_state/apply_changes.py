"""Applies changes of the job's keys to LocalJobState, and returns what follows from them.

Changes the state that it is given and has no other effect: the event for the membership machine and the effects on the
node's parts are returned. perform_effects.py performs them; decode.py reads the values of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagua_agent.etcd.keys import AfterLoss, JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.history import job_history
from bagua_agent.job_state import change_effects as do
from bagua_agent.job_state import console
from bagua_agent.job_state.decode import LeaderKey, StoreEvents
from bagua_agent.job_state.job_state import LocalJobState
from bagua_agent.membership import events as ev
from bagua_agent.membership.replica_groups import lists_whole_replicas
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind


@dataclass(frozen=True, slots=True)
class Applied:
    """What follows from a change, besides the state."""

    event: ev.Event | None  # for the membership machine; None: the change is none of its concern
    effects: tuple[do.Effect, ...]  # in the order in which they are performed


class ChangeApplier:
    """Applies changes to the state of a job.

    Remembers which agents have a key, as far as changes tell.
    """

    def __init__(self, agent_id: str, keys: JobKeys, seen: LocalJobState) -> None:
        self._agent_id = agent_id
        self._keys = keys
        self._put_again = keys.after_loss(AfterLoss.PUT_AGAIN, AfterLoss.PUT_OVER_A_NEW_JOB)
        self._seen = seen
        self._agents: set[str] = set()  # that have a key
        self._effects: list[do.Effect] = []  # of the change that is being applied
        self._events = StoreEvents(keys, self._unreadable)

    def apply(self, change: Change, ready_workers: frozenset[str], now_s: float) -> Applied:
        """Applies one change. ready_workers: those of this node, which have a key."""
        self._effects = []
        event = self._events.event_of(change, now_s)
        if change.value is None and self._is_own(change.key, ready_workers):
            # A leader that took this node for dead removed it; or etcd lost its data.
            self._effects.append(do.RecheckOwnKeys())
        if self._is_of_another_job(change, event):
            return Applied(None, tuple(self._effects))
        if isinstance(event, ev.GenerationSeen) and not lists_whole_replicas(
            event.generation, self._seen.replica_size
        ):
            self._unreadable(change.key, f"generation {event.generation.number} does not list whole replicas")
            event = None
        self._remember(change, event)
        self._note(change, event, ready_workers)
        return Applied(event, tuple(self._effects))

    def _is_of_another_job(self, change: Change, event: ev.Event | None) -> bool:
        """Tells whether the event is about another job of this id, from before or after the store lost its keys."""
        nonce = self._seen.spec.nonce
        match event:
            case ev.GenerationSeen():
                return event.generation.nonce != nonce
            case ev.MemberReady():
                return event.nonce != nonce  # a generation of ours must not contain it
            case ev.ReplicaSeen():
                return event.replica.nonce != nonce
            case ev.ModeSeen():
                spec = self._events.message_of(pb.JobSpec, change)
                return spec is None or spec.nonce != nonce
            case _:
                return False

    def _note(self, change: Change, event: ev.Event | None, ready_workers: frozenset[str]) -> None:
        keys, seen, effects = self._keys, self._seen, self._effects
        if change.key in (keys.generation, keys.closing, keys.result):
            seen.take_readable(change.key)
            if change.value is not None and event is None:
                seen.take_unreadable(change.key, change.mod_revision)
        if change.key == keys.generation and event is None:
            # Also of a value that can't be read: the next write compares its revision.
            seen.take_generation_revision(change.mod_revision if change.value is not None else 0)
        elif change.key == keys.meeting:
            meeting = self._events.meeting_of(change)
            if meeting is not None:
                effects.append(do.TellMeeting(meeting.generation, meeting.address))
        elif change.key == keys.leader:
            leader = self._events.message_of(pb.Leader, change)
            if leader is not None or change.value is None:
                seen.take_leader(_leader_key(leader, change))
                effects.append(do.FollowLeader())
        match event:
            case ev.GenerationSeen():
                seen.take_generation_revision(change.mod_revision)
                self._generation_seen(event.generation, ready_workers)
            case ev.ModeSeen() if seen.restarts and not event.restarts:
                seen.become_live()
                effects.append(do.BecomeLive())
            case ev.HangOrderSeen():
                effects.append(do.TakeHangOrder(event.order))
            case ev.ClosingSeen() if not seen.closing:
                seen.close_joins()
                effects += [do.CloseJoins(), do.Tell("every worker has committed its last step")]
            case ev.ResultSeen():
                seen.take_result(self._events.message_of(pb.Result, change))
                if seen.result is not None:
                    outcome = pb.Result.Outcome.Name(seen.result.outcome).lower()
                    effects.append(do.RecordEvent(job_history.ended(outcome, seen.result.reason)))
            case ev.AgentSeen():
                self._agents.add(event.agent.agent_id)
            case ev.AgentGone():
                self._agents.discard(event.agent_id)
            case ev.ReplicaSeen():
                effects.append(do.RecordEvent(job_history.replica_written(event.replica)))
            case ev.MemberRefused():
                refusal = self._events.message_of(pb.Refusal, change)
                difference = refusal.difference if refusal else "(unreadable)"
                effects.append(do.Refuse(event.worker_id, difference))
            case ev.SettingsPinned() if event.settings != seen.view.pinned_settings:
                text = f"settings of steps: {event.settings}"
                tuned = job_history.tuned(change.mod_revision, text)
                effects += [do.Tell(text, "tuned"), do.RecordEvent(tuned)]
            case ev.DesiredChanged() if (before := seen.view.desired) is not None:
                was, wanted = (before.min_nodes, before.max_nodes), (event.min_nodes, event.max_nodes)
                if was != wanted:
                    text = console.scaled(was, wanted)
                    scaled = job_history.scaled(change.mod_revision, text)
                    effects += [do.Tell(text, "scaled"), do.RecordEvent(scaled)]
            case _:
                pass

    def _remember(self, change: Change, event: ev.Event | None) -> None:
        """Remembers a value that must be put again if the store loses it. Never what can't be read, nor another job's
        spec."""
        keys, seen = self._keys, self._seen
        if change.value is None:
            return
        if change.key == keys.spec:
            spec = self._events.message_of(pb.JobSpec, change)
            if spec is not None and spec.nonce == seen.spec.nonce:
                seen.remember(change.key, change.value)
        elif change.key in self._put_again and event is not None:
            seen.remember(change.key, change.value)

    def _is_own(self, key: str, ready_workers: frozenset[str]) -> bool:
        own = {self._keys.agent(self._agent_id), *map(self._keys.member, ready_workers)}
        return key in own and self._seen.result is None

    def _generation_seen(self, generation: Generation, ready_workers: frozenset[str]) -> None:
        seen, before = self._seen, self._seen.generation
        if before is not None and generation.number <= before.number:
            return  # put again by another agent, after the store had lost it
        seen.take_generation(generation)
        if not seen.whole and not ready_workers <= {m.worker_id for m in generation.members}:
            self._effects.append(do.RecheckOwnKeys())  # perhaps: these keys are not followed
        self._effects.append(do.FollowGeneration(before, generation))
        if before is not None and generation.kind is GenerationKind.FAILOVER and seen.whole:
            # Not when the agent's key goes: after an outage of the store all keys may go and come back.
            staying = {m.agent_id for m in generation.members} | self._agents
            for agent_id, node_name in sorted({(m.agent_id, m.node_name) for m in before.members}):
                if agent_id not in staying:
                    lost = job_history.node_lost(agent_id, node_name, generation.number)
                    self._effects.append(do.RecordEvent(lost))
        formed = job_history.formed(generation, console.generation_written(before, generation))
        self._effects.append(do.RecordEvent(formed))

    def _unreadable(self, key: str, why: str) -> None:
        text = f"passing over {key}: {why}; remove it with etcdctl del"
        self._effects.append(do.Tell(text, f"unreadable {key}"))


def _leader_key(leader: pb.Leader | None, change: Change) -> LeaderKey | None:
    if leader is None:
        return None
    return LeaderKey(leader.agent_id, leader.control_address, change.create_revision)
