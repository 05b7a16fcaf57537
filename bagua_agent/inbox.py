"""Everything that can come to the agent's loop, from whatever thread learned of it first."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_agent.leadership import Report
from bagua_agent.store.leased_keys import LeaseEvent
from bagua_agent.store.mirror import Change
from bagua_contract import session_pb2


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    worker_id: str
    message: session_pb2.WorkerMessage


@dataclass(frozen=True, slots=True)
class StoreChanged:
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class StoreConnected:
    connected: bool


@dataclass(frozen=True, slots=True)
class LeaseChanged:
    event: LeaseEvent


@dataclass(frozen=True, slots=True)
class LeadershipReported:
    report: Report
