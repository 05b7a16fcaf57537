"""Passes changes of the job's keys through ChangeApplier and performs the effects that it returns. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bagua_agent.etcd.mirror import Change
from bagua_agent.job_state import change_effects as do
from bagua_agent.job_state.apply_changes import ChangeApplier
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.membership import events as ev
from bagua_agent.membership.hang import HangOrder
from bagua_contract.records import Generation


class Followers(Protocol):
    """The part of worker_lifecycle.WorkerLifecycle that receives records."""

    def follow(self, generation: Generation) -> None: ...

    def close_joins(self) -> None: ...

    def refuse(self, worker_id: str, difference: str) -> None: ...

    def met(self, generation: int, address: str) -> None: ...

    @property
    def ready_workers(self) -> frozenset[str]: ...


class ChangePerformer:
    """Takes changes of the job's keys for the agent's loop.

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
        self._applier = ChangeApplier(job.agent_id, job.keys, job.seen)
        self._terminal = job.terminal
        self._change_lines = job.change_lines
        self._history = job.history
        self._followers = followers
        self._on_leader_changed = on_leader_changed
        self._on_own_key_gone = on_own_key_gone
        self._on_live = on_live
        self._on_hang_order = on_hang_order

    def follow_with(self, followers: Followers) -> None:
        """Makes these followers receive records from now on."""
        self._followers = followers

    def take(self, changes: tuple[Change, ...], now_s: float) -> list[ev.Event]:
        """Applies the changes, performs what follows from each before the next, and returns the events for the machine,
        in order."""
        happened = []
        for change in changes:
            applied = self._applier.apply(change, self._followers.ready_workers, now_s)
            for effect in applied.effects:
                self._perform(effect, now_s)
            if applied.event is not None:
                happened.append(applied.event)
        return happened

    def _perform(self, effect: do.Effect, now_s: float) -> None:
        match effect:
            case do.RecheckOwnKeys():
                self._on_own_key_gone()
            case do.FollowLeader():
                self._on_leader_changed(now_s)
            case do.BecomeLive():
                self._on_live()
            case do.TakeHangOrder():
                self._on_hang_order(effect.order)
            case do.FollowGeneration():
                self._followers.follow(effect.generation)
                self._change_lines.formed(effect.before, effect.generation, now_s)
            case do.TellMeeting():
                self._followers.met(effect.generation, effect.address)
            case do.CloseJoins():
                self._followers.close_joins()
            case do.Refuse():
                self._followers.refuse(effect.worker_id, effect.difference)
            case do.RecordEvent():
                self._history.of_job(effect.event)
            case do.Tell():
                if effect.topic:
                    self._terminal.tell_once(effect.topic, effect.text)
                else:
                    self._terminal.tell(effect.text)
