"""What the agent's parts do after a change of a key, as apply_changes.py returns it and perform_effects.py does it.

Actions in the imperative; they hold values alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagua_agent.history.job_history import JobEvent
from bagua_agent.membership.hang import HangOrder
from bagua_contract.records import Generation


@dataclass(frozen=True, slots=True)
class RecheckOwnKeys:
    """A key that this node keeps was removed, or may have been."""


@dataclass(frozen=True, slots=True)
class FollowLeader:
    """LocalJobState.leader is new."""


@dataclass(frozen=True, slots=True)
class BecomeLive:
    """The job was one of restart mode until now."""


@dataclass(frozen=True, slots=True)
class TakeHangOrder:
    """The leader's order about a hang is new."""

    order: HangOrder | None  # None: the hang is over


@dataclass(frozen=True, slots=True)
class FollowGeneration:
    """A newer record is in force, or planned."""

    before: Generation | None
    generation: Generation


@dataclass(frozen=True, slots=True)
class TellMeeting:
    """The workers of a generation in restart mode meet at this address."""

    generation: int
    address: str


@dataclass(frozen=True, slots=True)
class CloseJoins:
    """No worker joins any more."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The leader refuses a worker."""

    worker_id: str
    difference: str


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """An event of the job for its history, which the leader writes."""

    event: JobEvent


@dataclass(frozen=True, slots=True)
class Tell:
    """A line for people."""

    text: str
    topic: str = ""  # of a line that is printed once as long as it stays the same; empty: printed each time


Effect = (
    RecheckOwnKeys
    | FollowLeader
    | BecomeLive
    | TakeHangOrder
    | FollowGeneration
    | TellMeeting
    | CloseJoins
    | Refuse
    | RecordEvent
    | Tell
)
