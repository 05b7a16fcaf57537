"""The messages of the agent's own threads to its loop; base/messages.py has those that other parts share."""

from __future__ import annotations

from dataclasses import dataclass, field

from bagua_agent.etcd.leased_keys import LeaseEvent
from bagua_agent.etcd.mirror import Change
from bagua_agent.large_jobs.scope import Scope
from bagua_agent.leadership.reports import ProbeResult, Report
from bagua_contract import session_pb2


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    worker_id: str
    message: session_pb2.WorkerMessage


@dataclass(frozen=True, slots=True)
class StoreChanged:
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class ScopeFollowed:
    """The whole content of `scope` was reported."""

    scope: Scope


@dataclass(frozen=True, slots=True)
class StoreConnected:
    connected: bool


@dataclass(frozen=True, slots=True)
class LeaseChanged:
    event: LeaseEvent


@dataclass(frozen=True, slots=True)
class KeyPairReplaced:
    """Agents that came later made another key pair for this job: they and this agent don't trust each other."""


@dataclass(frozen=True, slots=True)
class LeadershipReported:
    report: Report


@dataclass(slots=True)
class Gathered:
    """Messages that came one after the other and are decided on together. Changes of the
    store and answers to probes have no order anyway: they come from different threads."""

    changes: list[Change] = field(default_factory=list)
    probes: list[ProbeResult] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.changes) + len(self.probes)

    def takes(self, message: object) -> bool:
        """Tells whether `message` is of this kind; if so, adds it."""
        if isinstance(message, StoreChanged):
            self.changes += message.changes
            return True
        if isinstance(message, LeadershipReported) and isinstance(message.report, ProbeResult):
            self.probes.append(message.report)
            return True
        return False
