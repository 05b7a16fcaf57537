"""Holds what a node's daemon knows between two events: records, units, and the looks at the node that are due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import OrderView, RemovalView
from bagua_agent.cluster.unit_plan import OwnUnit
from bagua_agent.service.state_machine.messages import PutBack
from bagua_contract import cluster_pb2 as pb


@dataclass(frozen=True, slots=True)
class Now:
    """The time of a step. may_put_back: this daemon was not out of touch with etcd for so long that it may remember
    removed jobs. in_touch: etcd's watch is connected now."""

    monotonic_s: float
    unix_s: float
    may_put_back: bool = True
    in_touch: bool = True


@dataclass(frozen=True, slots=True)
class State:
    """The state of the daemon; `machine.step` returns the next one and changes nothing in it.

    orders: None if they are not known; orders_value: their record, orders_revision: its mod revision. outcomes: records
    by job. removals: by the nonce of the submission. to_put_back: by key. troubles: of the node, which two looks in a
    row agreed on; troubles_seen: by the last look, as notes are. note: of the daemon's own parts. look_due_s: for
    units. looks_at_s: at the node. look_since_s: since when a look at it is under way. logs_due_s: when logs are
    tidied; None before the first plan. again_s: the plan's own time.
    """

    node_name: str
    slots: int
    policy: ClusterPolicy
    orders: tuple[OrderView, ...] | None = None
    orders_value: bytes | None = None
    orders_revision: int = 0
    submissions: Mapping[str, pb.Submission] = field(default_factory=dict)
    outcomes: Mapping[str, bytes] = field(default_factory=dict)
    removals: Mapping[str, RemovalView] = field(default_factory=dict)
    to_put_back: Mapping[str, PutBack] = field(default_factory=dict)
    units: Mapping[str, OwnUnit] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()
    troubles_seen: tuple[str, ...] = ()
    note: str = ""
    notes: tuple[str, ...] = ()
    look_due_s: float | None = None
    looks_at_s: float = 0.0
    look_since_s: float | None = None
    look_hangs: bool = False
    logs_due_s: float | None = None
    again_s: float | None = 0.0

    @property
    def wake_at_s(self) -> float:
        """The time at which InboxDrained is due without any event."""
        return min(
            s for s in (self.looks_at_s, self.look_due_s, self.logs_due_s, self.again_s) if s is not None
        )
