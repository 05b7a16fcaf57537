"""The actions that the leader's state machine asks its shell to perform. Names are imperative; each failure comes back
as an event."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bagua_agent.membership.hang import HangOrder
from bagua_agent.membership.view import FailureView, Waiting
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation
from bagua_contract.replica import Replica


class ResultOutcome(Enum):
    SUCCEEDED = pb.Result.SUCCEEDED
    FAILED = pb.Result.FAILED
    STOPPED = pb.Result.STOPPED


@dataclass(frozen=True, slots=True)
class WriteGeneration:
    """Writes a generation, only if the record still has expected_previous_number (0: there is none), this agent still
    leads, and there is no result."""

    generation: Generation
    expected_previous_number: int


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Writes the job's result, only if this agent still leads and there is no result. failure: the one to show to the
    user."""

    outcome: ResultOutcome
    exit_code: int
    reason: str
    failure: FailureView | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """Asks this agent directly and, unless relay_agent_id is empty, at the same time through that one."""

    agent_id: str
    control_address: str
    relay_agent_id: str
    relay_address: str


@dataclass(frozen=True, slots=True)
class ProbeAgents:
    """Probes agents. Each question gives one direct and, if there is a relay, one relayed ProbeAnswered within the
    probe window; no answer by then, or no relay to be reached, is UNANSWERED."""

    questions: tuple[Question, ...]
    sequence: int

    @property
    def agent_ids(self) -> tuple[str, ...]:
        return tuple(q.agent_id for q in self.questions)


@dataclass(frozen=True, slots=True)
class RefuseMember:
    worker_id: str
    difference: str


@dataclass(frozen=True, slots=True)
class RemoveDeadAgent:
    """Removes the agent's keys and its members', only if the agent's key still has join_revision."""

    agent_id: str
    join_revision: int


@dataclass(frozen=True, slots=True)
class WriteHangOrder:
    """Writes the order about a hang for all agents; None removes it."""

    order: HangOrder | None


@dataclass(frozen=True, slots=True)
class WriteReplicas:
    """Puts the records of `replicas`, new ones and ones that are over, and removes those of the ids in `forgotten`."""

    replicas: tuple[Replica, ...]
    forgotten: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Sends TimePassed at time_s; replaces an earlier WakeAt."""

    time_s: float


Action = (
    WriteGeneration
    | WriteResult
    | ProbeAgents
    | RefuseMember
    | RemoveDeadAgent
    | WriteHangOrder
    | WriteReplicas
    | WakeAt
)


@dataclass(frozen=True, slots=True)
class AskWhetherAlive:
    """The agents that a decision wants probed. The machine adds relays and the sequence."""

    agent_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The action that the picture calls for now, and its reason.

    action: None means to wait. wake_at_s: decide again then, if nothing happens before. waiting: a wait that ends the
    job when it lasts too long, so the caller must remember since when. leaves_out: agents that the written generation
    excludes, though they live, and that come back only after a quarantine; and why. hang_order: the order that the
    store should contain by now.
    """

    action: WriteGeneration | WriteResult | AskWhetherAlive | None
    reason: str
    wake_at_s: float | None = None
    waiting: Waiting | None = None
    leaves_out: tuple[str, ...] = ()
    leaves_out_why: str = ""
    hang_order: HangOrder | None = None
