"""Translates changes of keys in the store into events of the membership machine.

DECODERS has an entry for each row of the table of keys (etcd/keys.py). Pure; the time is an argument. A value that
can't be read is reported and skipped: one corrupted key must not stop an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        found = self._keys.row_of(change.key)
        decoder = None if found is None else DECODERS[found[0].name]
        if found is None or decoder is None:
            return None
        owner = found[1]
        if change.value is None:
            return None if decoder.removed is None else decoder.removed(owner, now_s)
        try:
            return decoder.put(Put(owner, change.value, change.create_revision, now_s))
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


@dataclass(frozen=True, slots=True)
class Put:
    """The value of a key that was put."""

    owner: str  # the id in the key; empty for a key that the job has once
    value: bytes
    create_revision: int
    now_s: float


@dataclass(frozen=True, slots=True)
class Decoder:
    """How the changes of a key become events. put: raises DecodeError or ValueError for a value that can't be read.
    removed(owner, now_s): None: the removal makes no event."""

    put: Callable[[Put], ev.Event]
    removed: Callable[[str, float], ev.Event] | None = None


def _agent(put: Put) -> ev.Event:
    a = pb.Agent.FromString(put.value)
    _check_owner(put.owner, a.agent_id)
    agent = AgentView(
        agent_id=a.agent_id,
        node_name=a.node_name,
        slots=a.slots,
        topology=a.topology,
        leaving=a.leaving,
        control_address=a.control_address,
        join_revision=put.create_revision,
        ready=a.ready,
        run_generation=a.run_generation,
        run=Run(a.run),
        cut_off=frozenset(a.cut_off),
    )
    return ev.AgentSeen(now_s=put.now_s, agent=agent)


def _member(put: Put) -> ev.Event:
    m = pb.Member.FromString(put.value)
    _check_owner(put.owner, m.worker_id)
    if m.committed_generation > LARGEST_NUMBER:
        raise ValueError(
            f"it names generation {m.committed_generation} as committed, beyond {LARGEST_NUMBER}"
        )
    member = MemberView(
        worker_id=m.worker_id,
        agent_id=m.agent_id,
        slot=m.slot,
        store_address=m.store_address,
        fingerprint=dict(m.fingerprint),
        committed_generation=m.committed_generation,
        join_revision=put.create_revision,
        stage=Stage(m.stage),
    )
    return ev.MemberReady(now_s=put.now_s, member=member, nonce=m.nonce)


def _suspicion(put: Put) -> ev.Event:
    s = pb.Suspicion.FromString(put.value)
    _check_owner(put.owner, s.worker_id)
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
    return ev.SuspicionRaised(now_s=put.now_s, suspicion=suspicion)


def _failure(put: Put) -> ev.Event:
    f = pb.Failure.FromString(put.value)
    _check_owner(put.owner, f.worker_id)
    return ev.FailureRecorded(now_s=put.now_s, failure=FailureView.of(f, put.create_revision))


def _finished(put: Put) -> ev.Event:
    finished = pb.Finished.FromString(put.value)
    _check_owner(put.owner, finished.worker_id)
    return ev.WorkerFinished(
        now_s=put.now_s,
        worker_id=put.owner,
        step=finished.step,
        before_joining=finished.before_joining,
        agent_id=finished.agent_id,
        node_name=finished.node_name,
        generation=finished.generation,
    )


def _departed(put: Put) -> ev.Event:
    departure = pb.Departure.FromString(put.value)
    _check_owner(put.owner, departure.worker_id)
    return ev.WorkerDeparted(now_s=put.now_s, departure=_departure(departure))


def _spec(put: Put) -> ev.Event:
    spec = pb.JobSpec.FromString(put.value)
    return ev.ModeSeen(
        now_s=put.now_s,
        restarts=spec.mode == pb.JobSpec.RESTART,
        size_policy=SizePolicy.of(spec.size_policy),
        replica_size=max(1, spec.replica_size),
    )


def _replica(put: Put) -> ev.Event:
    replica = Replica.decode(put.value)
    _check_owner(put.owner, replica.replica_id)
    return ev.ReplicaSeen(now_s=put.now_s, replica=replica, order=put.create_revision)


def _desired(put: Put) -> ev.Event:
    d = pb.Desired.FromString(put.value)
    if not 1 <= d.min_nodes <= d.max_nodes:
        raise ValueError(f"desired nodes {d.min_nodes}:{d.max_nodes} are not 1 <= least <= most")
    return ev.DesiredChanged(now_s=put.now_s, min_nodes=d.min_nodes, max_nodes=d.max_nodes)


def _settings(put: Put) -> ev.Event:
    pinned = pb.PinnedSettings.FromString(put.value)
    settings = StepSettings.from_proto(pinned.settings)
    return ev.SettingsPinned(now_s=put.now_s, settings=settings, forgets=pinned.forgets)


def _study(put: Put) -> ev.Event:
    tuned = pb.Study.FromString(put.value).current
    return ev.SettingsTuned(now_s=put.now_s, settings=StepSettings.from_proto(tuned))


def _hang(put: Put) -> ev.Event:
    return ev.HangOrderSeen(now_s=put.now_s, order=_hang_order(pb.HangOrder.FromString(put.value)))


def _closing(put: Put) -> ev.Event:
    closing = pb.Closing.FromString(put.value)
    if not closing.generation:
        raise ValueError("it closes no generation")
    return ev.ClosingSeen(now_s=put.now_s, generation=closing.generation)


def _result(put: Put) -> ev.Event:
    if pb.Result.FromString(put.value).outcome == pb.Result.OUTCOME_UNSPECIFIED:
        raise ValueError("it tells no outcome")  # and ends nothing
    return ev.ResultSeen(now_s=put.now_s)


# By name in KEY_TABLE. None: membership has no event for the key; the comment names the part that reads it.
DECODERS: Mapping[str, Decoder | None] = {
    "spec": Decoder(_spec),
    "desired": Decoder(_desired),
    "settings": Decoder(_settings),
    "leader": None,  # apply_changes.py
    "generation": Decoder(
        lambda put: ev.GenerationSeen(now_s=put.now_s, generation=Generation.decode(put.value))
    ),
    "meeting": None,  # apply_changes.py
    "hang": Decoder(_hang, lambda _, now_s: ev.HangOrderSeen(now_s=now_s, order=None)),
    "closing": Decoder(_closing),
    "stop": None,  # job/loop.py
    "result": Decoder(_result),
    "agents": Decoder(_agent, lambda owner, now_s: ev.AgentGone(now_s=now_s, agent_id=owner)),
    "members": Decoder(_member, lambda owner, now_s: ev.MemberGone(now_s=now_s, worker_id=owner)),
    "suspicions": Decoder(_suspicion, lambda owner, now_s: ev.SuspicionCleared(now_s=now_s, worker_id=owner)),
    "failures": Decoder(_failure),
    "finished_workers": Decoder(_finished),
    "departures": Decoder(_departed),
    "refusals": Decoder(lambda put: ev.MemberRefused(now_s=put.now_s, worker_id=put.owner)),
    "replicas": Decoder(_replica, lambda owner, now_s: ev.ReplicaGone(now_s=now_s, replica_id=owner)),
    "events": None,  # history/history_keeper.py
    "measured": None,  # autotune/tuner.py
    "study": Decoder(_study),
    "identity": None,  # job/create_or_join.py
}


def _departure(d: pb.Departure) -> DepartureView:
    last = d.last
    if last.parts and last.part >= last.parts:
        raise ValueError(f"its part {last.part} is not below the number of parts, {last.parts}")
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
        raise ValueError(f"its duration {value_s} s is not from 0 to {LONGEST_DURATION_S:g} s")
    return value_s


def _check_owner(in_key: str, in_value: str) -> None:
    """Checks that two ids are equal; raises ValueError if they differ: the key's removal would leave behind what its
    value had put."""
    if in_key != in_value:
        raise ValueError(f"it is about {in_value!r}")
