"""Events and actions of a node's daemon: what it learns, in the past tense, and what it does, in the imperative."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from bagua_agent.cluster.cluster_view import UnitView
from bagua_agent.etcd.mirror import Change
from bagua_agent.service.units.units import FoundUnit, UnitNote
from bagua_contract import cluster_pb2 as pb


@dataclass(frozen=True, slots=True)
class RecordChanged:
    change: Change


@dataclass(frozen=True, slots=True)
class UnitKept:
    """A unit that an earlier daemon started was found, alive or ended. UnitsSeen follows. was_asked: to leave."""

    found: FoundUnit
    note: UnitNote
    was_asked: bool


@dataclass(frozen=True, slots=True)
class UnitsSeen:
    """The units of the node were read, all of them. reasons: by job, the errors that ended agents."""

    units: tuple[FoundUnit, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    job_id: str  # of the unit whose main process ended


@dataclass(frozen=True, slots=True)
class WatchFailed:
    """The main process of a unit can't be watched for its end."""

    job_id: str
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    """The start of a unit has returned; from here on UnitsSeen contains the unit. shutdown_timeout_s: the job's own;
    None: not known.

    trouble: what kept it from starting, which may pass; empty for nothing.
    """

    job_id: str
    shutdown_timeout_s: float | None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class StartRefused:
    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """The look at the node has ended. notes: what a person should see to, and what keeps no job away."""

    troubles: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LookFailed:
    """The look at the node did not come to its end."""

    reason: str


@dataclass(frozen=True, slots=True)
class Noted:
    text: str  # what of this node does not work now and keeps no job away; empty for nothing


@dataclass(frozen=True, slots=True)
class StandsAgain:
    """A key that the store had lost, or held as of earlier. put: the attempt that this answers. was_put: by this node;
    else it was written meanwhile, or its job was removed."""

    put: PutBack
    was_put: bool


@dataclass(frozen=True, slots=True)
class NotDone:
    """The unit runner, or etcd, did not carry out an action: read the state again, and retry what is still due."""

    reason: str


@dataclass(frozen=True, slots=True)
class ActFailed:
    """The unit runner did not act on a unit. may_be_done: it was not heard saying that it did."""

    job_id: str
    act: UnitAct
    reason: str
    may_be_done: bool = False


@dataclass(frozen=True, slots=True)
class InboxDrained:
    """The inbox is empty, or time has passed, so the plan is followed."""


Taken = UnitsSeen | ProcessEnded | WatchFailed | Started | StartRefused | Noted | StandsAgain | NotDone
Event = Taken | ActFailed | NodeSeen | LookFailed | RecordChanged | UnitKept | InboxDrained


@dataclass(frozen=True, slots=True)
class Say:
    line: str


@dataclass(frozen=True, slots=True)
class LookForUnits:
    """Read the units of the node. UnitsSeen follows."""


@dataclass(frozen=True, slots=True)
class LookAtNode:
    """Look at the node. NodeSeen or LookFailed follows, or nothing: what is looked at may hang for ever."""


@dataclass(frozen=True, slots=True)
class WatchProcess:
    """Watch a unit's main process for its end. ProcessEnded or WatchFailed follows."""

    job_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class StartUnit:
    """Start a unit. Started or StartRefused follows. order: its number. failures: in a row before this start."""

    submission: pb.Submission
    slots: tuple[int, ...]
    order: int
    failures: int


class UnitAct(Enum):
    """The ways to act on a unit. FORGET: end what is left of it. REMOVE: its folder too."""

    ASK_TO_LEAVE = auto()
    KILL = auto()
    FORGET = auto()
    REMOVE = auto()


@dataclass(frozen=True, slots=True)
class ActOnUnit:
    """Act on a unit. UnitsSeen, ActFailed or NotDone follows."""

    job_id: str
    act: UnitAct


@dataclass(frozen=True, slots=True)
class RemoveLogs:
    """Remove the logs that a job's submission `nonce` left on this node."""

    job_id: str
    nonce: str


@dataclass(frozen=True, slots=True)
class TidyLogs:
    """Remove logs of submissions that were not known for long, as after a removal that this node never heard of. known:
    jobs with the nonces of submissions; an empty nonce is any submission's."""

    known: frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class PutBack:
    """Put a key that the store has lost, or holds as of earlier. StandsAgain follows.

    nonce: of the submission that the key is of, if of any; not done once that is removed. over_revision: mod revision
    of the earlier value, the only one that it may replace; 0: none, so the key must be absent.
    """

    key: str
    value: bytes
    nonce: str
    over_revision: int = 0


@dataclass(frozen=True, slots=True)
class TellFailure:
    """Write a failure among the job's events, unless the job is over or removed. failures: in a row; 0: the job was
    refused."""

    submission: pb.Submission
    failures: int
    reason: str


@dataclass(frozen=True, slots=True)
class RecheckNodeKey:
    """Put this node's key again if etcd has lost it."""


@dataclass(frozen=True, slots=True)
class Report:
    """Report the units to the scheduler. status: to systemd."""

    units: tuple[UnitView, ...]
    troubles: tuple[str, ...]
    note: str
    status: str


Looks = LookForUnits | LookAtNode | WatchProcess
Logs = RemoveLogs | TidyLogs
Action = Looks | Say | StartUnit | ActOnUnit | Logs | PutBack | TellFailure | RecheckNodeKey | Report
