"""Translates changes of keys in the store into events of the membership machine.

Pure; the time is an argument. A value that can't be read is reported and skipped: one corrupted key must not stop an
agent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from bagua_agent.base.sizes import SizePolicy
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.membership import events as ev
from bagua_agent.membership.hang import HangOrder, HangOutcome
from bagua_agent.membership.view import (
    AgentView,
    DepartureView,
    FailureView,
    MemberView,
    Run,
    SuspicionView,
)
from bagua_agent.rpc.control_client import endpoint_of
from bagua_contract import membership_pb2 as pb
from bagua_contract.collective_wait import CollectiveWait
from bagua_contract.records import LARGEST_NUMBER, Generation, Stage, StateName, SuspicionKind
from bagua_contract.replica import Replica
from bagua_contract.step_settings import StepSettings

M = TypeVar("M", bound=Message)

LONGEST_DURATION_S = 1e9


@dataclass(frozen=True, slots=True)
class LeaderKey:
    """The content of control/leader."""

    agent_id: str
    control_address: str
    create_revision: int


class StoreEvents:
    """Makes events of changes. on_unreadable(key, why) is called for values that no agent of this protocol writes."""

    def __init__(self, keys: JobKeys, on_unreadable: Callable[[str, str], None]) -> None:
        self._keys = keys
        self._on_unreadable = on_unreadable

    def event_of(self, change: Change, now_s: float) -> ev.Event | None:
        """Returns the event of a change; None for a change that membership does not care about."""
        try:
            return self._removed(change, now_s) if change.value is None else self._put(change, now_s)
        except (DecodeError, ValueError) as error:
            self._on_unreadable(change.key, str(error))
            return None

    def message_of(self, kind: type[M], change: Change) -> M | None:
        """Returns the message that was put; None for a removal, and for a value that can't be read."""
        if change.value is None:
            return None
        try:
            return kind.FromString(change.value)
        except DecodeError as error:
            self._on_unreadable(change.key, str(error))
            return None

    def meeting_of(self, change: Change) -> pb.Meeting | None:
        """Returns the meeting that was put; None for a removal, and for one that has no host and port to connect to."""
        meeting = self.message_of(pb.Meeting, change)
        if meeting is not None and endpoint_of(meeting.address) is None:
            self._on_unreadable(change.key, f"{meeting.address[:100]!r} is no address with a port")
            return None
        return meeting

    def _removed(self, change: Change, now_s: float) -> ev.Event | None:
        keys = self._keys
        if agent_id := keys.id_in(keys.agents, change.key):
            return ev.AgentGone(now_s=now_s, agent_id=agent_id)
        if worker_id := keys.id_in(keys.members, change.key):
            return ev.MemberGone(now_s=now_s, worker_id=worker_id)
        if worker_id := keys.id_in(keys.suspicions, change.key):
            return ev.SuspicionCleared(now_s=now_s, worker_id=worker_id)
        if replica_id := keys.id_in(keys.replicas, change.key):
            return ev.ReplicaGone(now_s=now_s, replica_id=replica_id)
        if change.key == keys.hang:
            return ev.HangOrderSeen(now_s=now_s, order=None)
        return None

    def _put(self, change: Change, now_s: float) -> ev.Event | None:
        keys, key, value = self._keys, change.key, change.value or b""
        if agent_id := keys.id_in(keys.agents, key):
            a = pb.Agent.FromString(value)
            _check_owner(agent_id, a.agent_id)
            agent = AgentView(
                agent_id=a.agent_id,
                node_name=a.node_name,
                slots=a.slots,
                topology=a.topology,
                leaving=a.leaving,
                control_address=a.control_address,
                join_revision=change.create_revision,
                ready=a.ready,
                run_generation=a.run_generation,
                run=Run(a.run),
                cut_off=frozenset(a.cut_off),
            )
            return ev.AgentSeen(now_s=now_s, agent=agent)
        if worker_id := keys.id_in(keys.members, key):
            m = pb.Member.FromString(value)
            _check_owner(worker_id, m.worker_id)
            if m.committed_generation > LARGEST_NUMBER:
                raise ValueError(f"it tells of a commit in generation {m.committed_generation}")
            member = MemberView(
                worker_id=m.worker_id,
                agent_id=m.agent_id,
                slot=m.slot,
                store_address=m.store_address,
                fingerprint=dict(m.fingerprint),
                committed_generation=m.committed_generation,
                join_revision=change.create_revision,
                stage=Stage(m.stage),
            )
            return ev.MemberReady(now_s=now_s, member=member, nonce=m.nonce)
        if worker_id := keys.id_in(keys.suspicions, key):
            s = pb.Suspicion.FromString(value)
            _check_owner(worker_id, s.worker_id)
            suspicion = SuspicionView(
                worker_id=s.worker_id,
                generation=s.generation,
                kind=SuspicionKind(s.kind),
                hosts=tuple(s.hosts),
                sequence=s.sequence,
                detail=s.detail,
                waited_s=_duration(s.waited_s),
                usual_step_s=_duration(s.usual_step_s),
                waits_in=CollectiveWait.from_proto(s.waits_in) if s.HasField("waits_in") else None,
            )
            return ev.SuspicionRaised(now_s=now_s, suspicion=suspicion)
        if worker_id := keys.id_in(keys.failures, key):
            f = pb.Failure.FromString(value)
            _check_owner(worker_id, f.worker_id)
            return ev.FailureRecorded(now_s=now_s, failure=FailureView.of(f, change.create_revision))
        if worker_id := keys.id_in(keys.finished_workers, key):
            finished = pb.Finished.FromString(value)
            _check_owner(worker_id, finished.worker_id)
            return ev.WorkerFinished(
                now_s=now_s,
                worker_id=worker_id,
                step=finished.step,
                before_joining=finished.before_joining,
                agent_id=finished.agent_id,
                node_name=finished.node_name,
                generation=finished.generation,
            )
        if worker_id := keys.id_in(keys.departures, key):
            departure = pb.Departure.FromString(value)
            _check_owner(worker_id, departure.worker_id)
            return ev.WorkerDeparted(now_s=now_s, departure=_departure(departure))
        if worker_id := keys.id_in(keys.refusals, key):
            return ev.MemberRefused(now_s=now_s, worker_id=worker_id)
        if key == keys.spec:
            spec = pb.JobSpec.FromString(value)
            restarts = spec.mode == pb.JobSpec.RESTART
            return ev.ModeSeen(
                now_s=now_s,
                restarts=restarts,
                size_policy=SizePolicy.of(spec.size_policy),
                replica_size=max(1, spec.replica_size),
            )
        if replica_id := keys.id_in(keys.replicas, key):
            replica = Replica.decode(value)
            _check_owner(replica_id, replica.replica_id)
            return ev.ReplicaSeen(now_s=now_s, replica=replica, order=change.create_revision)
        if key == keys.generation:
            return ev.GenerationSeen(now_s=now_s, generation=Generation.decode(value))
        if key == keys.desired:
            d = pb.Desired.FromString(value)
            if not 1 <= d.min_nodes <= d.max_nodes:
                raise ValueError(f"desired nodes {d.min_nodes}:{d.max_nodes} are not 1 <= least <= most")
            return ev.DesiredChanged(now_s=now_s, min_nodes=d.min_nodes, max_nodes=d.max_nodes)
        if key == keys.settings:
            pinned = pb.PinnedSettings.FromString(value)
            settings = StepSettings.from_proto(pinned.settings)
            return ev.SettingsPinned(now_s=now_s, settings=settings, forgets=pinned.forgets)
        if key == keys.study:
            tuned = pb.Study.FromString(value).current
            return ev.SettingsTuned(now_s=now_s, settings=StepSettings.from_proto(tuned))
        if key == keys.hang:
            return ev.HangOrderSeen(now_s=now_s, order=_hang_order(pb.HangOrder.FromString(value)))
        if key == keys.closing:
            closing = pb.Closing.FromString(value)
            if not closing.generation:
                raise ValueError("it closes no generation")
            return ev.ClosingSeen(now_s=now_s, generation=closing.generation)
        if key == keys.result:
            if pb.Result.FromString(value).outcome == pb.Result.OUTCOME_UNSPECIFIED:
                raise ValueError("it tells no outcome")  # and ends nothing
            return ev.ResultSeen(now_s=now_s)
        return None


def _departure(d: pb.Departure) -> DepartureView:
    last = d.last
    if last.parts and last.part >= last.parts:
        raise ValueError(f"it tells of part {last.part} of {last.parts}")
    state = StateName(last.state.generation, last.state.step, last.state.operations)
    return DepartureView(
        worker_id=d.worker_id,
        node_name=d.node_name,
        generation=d.generation,
        world_size=d.world_size,
        state=state,
        part=last.part,
        parts=last.parts,
        replica=last.replica,
        written=last.written,
        problem=last.problem,
        holds_nothing=d.HasField("last") and state.is_none,
    )


def _hang_order(order: pb.HangOrder) -> HangOrder:
    name = pb.HangOrder.Outcome.Name(order.outcome)
    if name not in HangOutcome.__members__:
        raise ValueError(f"it orders {name}")
    return HangOrder(order.generation, HangOutcome[name], tuple(order.workers), order.reason)


def _duration(value_s: float) -> float:
    if not 0 <= value_s < LONGEST_DURATION_S:  # not a number fails too
        raise ValueError(f"it tells of {value_s} s")
    return value_s


def _check_owner(in_key: str, in_value: str) -> None:
    """Checks that two ids are equal; raises ValueError if they differ: the key's removal would leave behind what its
    value had put."""
    if in_key != in_value:
        raise ValueError(f"it is about {in_value!r}")
