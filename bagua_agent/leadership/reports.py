"""The reports of the operations of a leader, or of a candidate, to the agent's loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from bagua_agent.membership.view import ProbeVerdict
from bagua_agent.rpc.reachability import Reachability


@dataclass(frozen=True, slots=True)
class Elected:
    create_revision: int


@dataclass(frozen=True, slots=True)
class NotElected:
    pass


@dataclass(frozen=True, slots=True)
class GenerationRefused:
    """The transaction of a generation was not done, or its outcome is unknown: read the current record."""

    number: int
    reason: str


class Act(Enum):
    """The purpose of a write of the leader, or of a candidate."""

    ELECTION = "election"
    LEADER_REMOVAL = "leader-removal"
    GENERATION = "generation"
    RESULT = "result"
    REFUSAL = "refusal"
    HANG_ORDER = "hang-order"
    AGENT_REMOVAL = "agent-removal"
    REPLICAS = "replicas"
    STUDY = "study"


@dataclass(frozen=True, slots=True)
class Written:
    act: Act


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A write failed. ends_leading: trying again would fail again, so another agent should lead."""

    act: Act
    what: str
    reason: str
    ends_leading: bool = False


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """The question could not be asked: this says nothing about the agent."""

    agent_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeResult:
    agent_id: str
    sequence: int
    relayed: bool
    verdict: ProbeVerdict
    workers: tuple[str, ...] | None = None  # alive there, if it answered


@dataclass(frozen=True, slots=True)
class Touched:
    """The end of a round of touches. found: empty if they could not be sent."""

    found: Mapping[str, Reachability]


Report = (
    Elected | NotElected | Written | GenerationRefused | WriteFailed | ProbeResult | ProbeFailed | Touched
)
