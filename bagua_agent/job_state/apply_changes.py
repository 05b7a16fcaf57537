"""Applies changes in the store to LocalJobState, and informs the node's parts of what is new.

Returns the events for the membership machine. Writes nothing to the store. decode.py reads the values of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bagua_agent.etcd.keys import AfterLoss
from bagua_agent.etcd.mirror import Change
from bagua_agent.history import job_history
from bagua_agent.job_state import console
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.job_state.decode import LeaderKey, StoreEvents
from bagua_agent.membership import events as ev
from bagua_agent.membership.hang import HangOrder
from bagua_agent.membership.replica_groups import lists_whole_replicas
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind


class Followers(Protocol):
    """The part of worker_lifecycle.WorkerLifecycle that receives records."""

    def follow(self, generation: Generation) -> None: ...

    def close_joins(self) -> None: ...

    def refuse(self, worker_id: str, difference: str) -> None: ...

    def met(self, generation: int, address: str) -> None: ...

    @property
    def ready_workers(self) -> frozenset[str]: ...


class ChangeApplier:
    """Applies changes to LocalJobState and calls what follows from them.

    on_leader_changed(now_s): LocalJobState.leader is new. on_own_key_gone(): a key that this node keeps was removed.
    on_live(): the job was one of restart mode until now. on_hang_order(order): the leader's order about a hang is new;
    None: it is over.
    """

    def __init__(
        self,
        job: JoinedJob,
        followers: Followers,
        on_leader_changed: Callable[[float], None],
        on_own_key_gone: Callable[[], None],
        on_live: Callable[[], None],
        on_hang_order: Callable[[HangOrder | None], None] = lambda order: None,
    ) -> None:
        self._agent_id = job.agent_id
        self._keys = job.keys
        self._put_again = job.keys.after_loss(AfterLoss.PUT_AGAIN, AfterLoss.PUT_OVER_A_NEW_JOB)
        self._seen = job.seen
        self._terminal = job.terminal
        self._change_lines = job.change_lines
        self._history = job.history
        self._followers = followers
        self._on_leader_changed = on_leader_changed
        self._on_own_key_gone = on_own_key_gone
        self._on_live = on_live
        self._on_hang_order = on_hang_order
        self._agents: set[str] = set()  # that have a key
        self._events = StoreEvents(job.keys, self._unreadable)

    def follow_with(self, followers: Followers) -> None:
        """Makes these followers receive records from now on."""
        self._followers = followers

    def take(self, changes: tuple[Change, ...], now_s: float) -> list[ev.Event]:
        """Applies the changes and returns the events for the machine, in order."""
        happened = []
        for change in changes:
            event = self._events.event_of(change, now_s)
            if change.value is None and self._is_own(change.key):
                # A leader that took this node for dead removed it; or etcd lost its data.
                self._on_own_key_gone()
            if isinstance(event, ev.GenerationSeen) and event.generation.nonce != self._seen.spec.nonce:
                continue  # of another job of this id, from before or after the store lost its keys
            if isinstance(event, ev.MemberReady) and event.nonce != self._seen.spec.nonce:
                continue  # its state belongs to the other job: a generation of ours must not contain it
            if isinstance(event, ev.ModeSeen) and not self._is_own_spec(change):
                continue
            if isinstance(event, ev.ReplicaSeen) and event.replica.nonce != self._seen.spec.nonce:
                continue  # of another job's workers
            if isinstance(event, ev.GenerationSeen) and not lists_whole_replicas(
                event.generation, self._seen.replica_size
            ):
                self._unreadable(
                    change.key, f"generation {event.generation.number} does not list whole replicas"
                )
                event = None
            if event is not None:
                happened.append(event)
            self._note(change, event, now_s)
        return happened

    def _note(self, change: Change, event: ev.Event | None, now_s: float) -> None:
        keys, seen = self._keys, self._seen
        self._remember(change, event)
        if change.key in (keys.generation, keys.closing, keys.result):
            seen.take_readable(change.key)
            if change.value is not None and event is None:
                seen.take_unreadable(change.key, change.mod_revision)
        if change.key == keys.generation and event is None:
            # Also of a value that can't be read: the next write compares its revision.
            seen.take_generation_revision(change.mod_revision if change.value is not None else 0)
        elif change.key == keys.generation and isinstance(event, ev.GenerationSeen):
            seen.take_generation_revision(change.mod_revision)
            self._generation_seen(event.generation, now_s)
        elif isinstance(event, ev.ModeSeen):
            if seen.restarts and not event.restarts:
                seen.become_live()
                self._on_live()
        elif isinstance(event, ev.HangOrderSeen):
            self._on_hang_order(event.order)
        elif change.key == keys.meeting:
            meeting = self._events.meeting_of(change)
            if meeting is not None:
                self._followers.met(meeting.generation, meeting.address)
        elif change.key == keys.leader:
            leader = self._events.message_of(pb.Leader, change)
            if leader is not None or change.value is None:
                seen.take_leader(_leader_key(leader, change))
                self._on_leader_changed(now_s)
        elif isinstance(event, ev.ClosingSeen) and not seen.closing:
            seen.close_joins()
            self._followers.close_joins()
            self._terminal.tell("every worker has committed its last step")
        elif change.key == keys.result and isinstance(event, ev.ResultSeen):
            seen.take_result(self._events.message_of(pb.Result, change))
            if seen.result is not None:
                outcome = pb.Result.Outcome.Name(seen.result.outcome).lower()
                self._history.of_job(job_history.ended(outcome, seen.result.reason))
        elif isinstance(event, ev.AgentSeen):
            self._agents.add(event.agent.agent_id)
        elif isinstance(event, ev.AgentGone):
            self._agents.discard(event.agent_id)
        elif isinstance(event, ev.ReplicaSeen):
            self._history.of_job(job_history.replica_written(event.replica))
        elif isinstance(event, ev.MemberRefused):
            refusal = self._events.message_of(pb.Refusal, change)
            self._followers.refuse(event.worker_id, refusal.difference if refusal else "(unreadable)")
        elif isinstance(event, ev.SettingsPinned):
            if event.settings != seen.view.pinned_settings:
                text = f"settings of steps: {event.settings}"
                self._terminal.tell_once("tuned", text)
                self._history.of_job(job_history.tuned(change.mod_revision, text))
        elif change.key == keys.desired and isinstance(event, ev.DesiredChanged):
            before = seen.view.desired
            if before is not None:
                was, wanted = (before.min_nodes, before.max_nodes), (event.min_nodes, event.max_nodes)
            if before is not None and was != wanted:
                text = console.scaled(was, wanted)
                self._terminal.tell_once("scaled", text)
                self._history.of_job(job_history.scaled(change.mod_revision, text))

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

    def _is_own_spec(self, change: Change) -> bool:
        spec = self._events.message_of(pb.JobSpec, change)
        return spec is not None and spec.nonce == self._seen.spec.nonce

    def _is_own(self, key: str) -> bool:
        own = {self._keys.agent(self._agent_id), *map(self._keys.member, self._followers.ready_workers)}
        return key in own and self._seen.result is None

    def _generation_seen(self, generation: Generation, now_s: float) -> None:
        before = self._seen.generation
        if before is not None and generation.number <= before.number:
            return  # put again by another agent, after the store had lost it
        self._seen.take_generation(generation)
        if not self._seen.whole and not self._followers.ready_workers <= {
            m.worker_id for m in generation.members
        }:
            self._on_own_key_gone()  # perhaps: these keys are not followed
        self._followers.follow(generation)
        self._change_lines.formed(before, generation, now_s)
        if before is not None and generation.kind is GenerationKind.FAILOVER and self._seen.whole:
            # Not when the agent's key goes: after an outage of the store all keys may go and come back.
            staying = {m.agent_id for m in generation.members} | self._agents
            for agent_id, node_name in sorted({(m.agent_id, m.node_name) for m in before.members}):
                if agent_id not in staying:
                    self._history.of_job(job_history.node_lost(agent_id, node_name, generation.number))
        self._history.of_job(job_history.formed(generation, console.generation_written(before, generation)))

    def _unreadable(self, key: str, why: str) -> None:
        self._terminal.tell_once(
            f"unreadable {key}", f"passing over {key}: {why}; remove it with etcdctl del"
        )


def _leader_key(leader: pb.Leader | None, change: Change) -> LeaderKey | None:
    if leader is None:
        return None
    return LeaderKey(leader.agent_id, leader.control_address, change.create_revision)
