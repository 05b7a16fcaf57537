"""The events that the membership decisions react to: past tense, frozen, each with the time at which the agent learned
of it.

The store's keys come as events both when they are first read and when they change; the same key read twice is no
change. Answers of actions come as events too, failures of actions included.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagua_agent.base.sizes import ANY_SIZE, SizePolicy
from bagua_agent.membership.hang import HangOrder
from bagua_agent.membership.view import (
    AgentView,
    DepartureView,
    FailureView,
    MemberView,
    ProbeVerdict,
    SuspicionView,
)
from bagua_contract.records import Generation
from bagua_contract.replica import Replica
from bagua_contract.step_settings import StepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event that an agent learned of. now_s: the time of that on the agent's monotonic clock; never goes back."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSeen(Event):
    """The key agents/<agent> was put. agent: as the key says; the picture adds since when."""

    agent: AgentView


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentGone(Event):
    agent_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReady(Event):
    """The key members/<worker> was put: ready, or a new commit is known. nonce: of its job, as in Generation.nonce."""

    member: MemberView
    nonce: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberGone(Event):
    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRefused(Event):
    """The key refused/<worker> was put."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSeen(Event):
    """The key replicas/<replica> was put. order: create revision of the key."""

    replica: Replica
    order: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGone(Event):
    """The key replicas/<replica> was deleted."""

    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSeen(Event):
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationWriteRefused(Event):
    """A WriteGeneration did not happen: this agent leads no longer, the record had changed, or the store was
    unavailable.

    If it is unknown whether it happened, read the record first: GenerationSeen, then this if it had not.
    """

    number: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspicionRaised(Event):
    """The key suspicions/<worker> was put."""

    suspicion: SuspicionView


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspicionCleared(Event):
    """The key suspicions/<worker> was deleted."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HangOrderSeen(Event):
    """The key control/hang was put, or deleted. order: None if it was deleted."""

    order: HangOrder | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswered(Event):
    """An agent answered a probe. relayed: the answer came through another agent. sequence: that of the ProbeAgents.
    workers: those that live there, if the answer says so."""

    agent_id: str
    sequence: int
    verdict: ProbeVerdict
    relayed: bool = False
    workers: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDoubted(Event):
    """The agent's host refused this agent's touch, or was silent for several rounds. Restart mode only."""

    agent_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecorded(Event):
    """The key failures/<worker> was put."""

    failure: FailureView


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFinished(Event):
    """A worker ended with 0. step: steps committed by its last report. before_joining: it never asked to join.
    generation: the one it was started for in restart mode; else 0."""

    worker_id: str
    step: int = 0
    before_joining: bool = False
    agent_id: str = ""
    node_name: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeparted(Event):
    """The key departed/<worker> was put."""

    departure: DepartureView


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredChanged(Event):
    min_nodes: int
    max_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsPinned(Event):
    """The key control/settings was put. It is never removed: a removal means that the store lost it. forgets: grows
    whenever what trials found is to be forgotten."""

    settings: StepSettings
    forgets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsTuned(Event):
    """The key tuning/study was put: the settings that the tuner wants now."""

    settings: StepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeSeen(Event):
    """The spec of the job was put. restarts: its workers are started again for each generation."""

    restarts: bool
    size_policy: SizePolicy = ANY_SIZE
    replica_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingSeen(Event):
    """The key control/closing was put. generation: the one that confirmed the last step."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultSeen(Event):
    """The key control/result was put: nothing is decided any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultWriteRefused(Event):
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed(Event):
    """A WakeAt came due, or nothing happened for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadershipWon(Event):
    """This agent was elected. revision: create revision of control/leader, the fencing token."""

    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadershipLost(Event):
    """This agent leads no longer: the key is gone or another agent's. Actions under way may still fail or succeed."""
