"""The scheduler's picture of the cluster: nodes with their units, submissions, orders and the progress of jobs.

Does not know the store. Times are those of the reader's own clock, so machines' clocks need not agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from bagua_agent.base.sizes import ANY_SIZE, SizePolicy
from bagua_contract import cluster_pb2 as pb


class UnitState(Enum):
    WAITING = pb.Unit.WAITING
    RUNNING = pb.Unit.RUNNING
    LEAVING = pb.Unit.LEAVING
    ENDED = pb.Unit.ENDED
    REFUSED = pb.Unit.REFUSED


class JobEnd(Enum):
    SUCCEEDED = pb.JobOutcome.SUCCEEDED
    FAILED = pb.JobOutcome.FAILED
    STOPPED = pb.JobOutcome.STOPPED


@dataclass(frozen=True, slots=True)
class UnitView:
    """A unit as its node reports it. slots: places on the node. failures: in a row. order: number that it follows."""

    job_id: str
    state: UnitState
    slots: tuple[int, ...] = ()
    failures: int = 0
    exit_code: int = 0
    reason: str = ""
    order: int = 0

    @property
    def alive(self) -> bool:
        """Whether the unit has processes, so that its slots are taken."""
        return self.state in (UnitState.RUNNING, UnitState.LEAVING)


@dataclass(frozen=True, slots=True)
class DrainView:
    force: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as the scheduler sees it. present: its daemon's key exists; if not, the rest is the last known state, and
    absent_since_s is when this scheduler first missed it. boot_id: of its host's kernel; empty: not known."""

    node_name: str
    slots: int
    labels: Mapping[str, str] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()
    units: tuple[UnitView, ...] = ()
    drain: DrainView | None = None
    present: bool = True
    absent_since_s: float = 0.0
    boot_id: str = ""

    def unit(self, job_id: str) -> UnitView | None:
        return next((u for u in self.units if u.job_id == job_id), None)


@dataclass(frozen=True, slots=True)
class SubmissionView:
    """A job that people asked for. slots_per_node: 0 is all slots of each node. stop: the job is to end. nonce: tells
    the job from an earlier and a later one of its name. size_policy: numbers of nodes that the job may have.
    submitted_unix_s: by the submitter's clock, for people; no decision depends on it."""

    job_id: str
    min_nodes: int
    max_nodes: int
    slots_per_node: int = 0
    priority: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    stop: bool = False
    nonce: str = ""
    size_policy: SizePolicy = ANY_SIZE
    submitted_unix_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(
                f"job {self.job_id!r}: nodes must be 1 <= least <= most, not {self.min_nodes}:{self.max_nodes}"
            )
        if self.slots_per_node < 0:
            raise ValueError(
                f"job {self.job_id!r}: slots_per_node must not be negative, not {self.slots_per_node}; "
                "0 asks for all slots of each node"
            )


@dataclass(frozen=True, slots=True)
class OrderView:
    """An order for one job on one node. slots: how many; the daemon chooses which. number: larger for a later order.
    nonce: of the submission; empty if it is not known."""

    job_id: str
    slots: int
    number: int
    nonce: str = ""

    def is_of_another(self, nonce: str) -> bool:
        """Tells whether the order is certainly not of the submission of `nonce`, but of another one of its name."""
        return bool(self.nonce) and self.nonce != nonce


@dataclass(frozen=True, slots=True)
class OutcomeView:
    """The end of a job. since_s: when this scheduler first saw it. ended_unix_s: by the clock of its writer; 0: it is
    not written."""

    end: JobEnd
    exit_code: int = 0
    reason: str = ""
    since_s: float = float("-inf")
    ended_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RemovalView:
    """A job that was removed. removed_unix_s: by the remover's clock."""

    job_id: str
    removed_unix_s: float


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a job, as its own keys contain it. begun: it has had a generation. result: the job's own record
    that it is over.

    arrived: nodes whose workers are all in the newest generation, or ready to be taken into the next one. replicas:
    nodes of each replica that is not over and has workers on several nodes.
    """

    begun: bool = False
    arrived: frozenset[str] = frozenset()
    result: OutcomeView | None = None
    replicas: tuple[frozenset[str], ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterView:
    """One cluster as its keys describe it.

    submissions: in the order of submission. orders: by node; one that is missing has no key, which says nothing.
    progress: by job; none for jobs without keys. outcomes: those in the store. since_s: when the picture began, by the
    scheduler's election or when it saw that the store had lost its keys. removed: names of jobs that were removed and
    not submitted again.
    """

    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    submissions: tuple[SubmissionView, ...] = ()
    orders: Mapping[str, tuple[OrderView, ...]] = field(default_factory=dict)
    progress: Mapping[str, JobProgress] = field(default_factory=dict)
    outcomes: Mapping[str, OutcomeView] = field(default_factory=dict)
    since_s: float = float("-inf")
    removed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        ids = [s.job_id for s in self.submissions]
        if len(set(ids)) != len(ids):
            twice = sorted({i for i in ids if ids.count(i) > 1})
            raise ValueError(f"jobs submitted twice under one id: {', '.join(twice)}; read each key once")
        for node_name, orders in self.orders.items():
            if len({o.job_id for o in orders}) != len(orders):
                raise ValueError(f"orders of node {node_name!r} name a job twice: {orders}")

    def node(self, node_name: str) -> NodeView:
        """Returns a node. One that was never seen here, though there are orders for it, counts as missed from the
        beginning."""
        known = self.nodes.get(node_name)
        return known or NodeView(node_name, 0, present=False, absent_since_s=self.since_s)
