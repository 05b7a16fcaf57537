"""Shows the cluster's jobs and nodes. Reads the store once and takes reasons from the scheduler's own decision.

A job's state is not stored: it is computed here by the same pure function with which the scheduler decides, so the
status can't disagree with the decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from bagua_agent.base.plain_text import shortened
from bagua_agent.cluster.cluster_plan import JobState
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import UnreadableRecord, parse_node, parse_submission
from bagua_agent.cluster.cluster_view import ClusterView, SubmissionView, UnitState
from bagua_agent.cluster.node_state import NodeState, state_of, taken_slots
from bagua_agent.cluster.scheduling import plan
from bagua_agent.cluster_state.cluster_picture import ClusterPicture
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import KeyValue, Store
from bagua_agent.etcd.mirror import difference
from bagua_contract import cluster_pb2 as pb

ABSENT_KEPT_S = 3600.0  # a node that was taken out of the cluster is not shown for longer
LONGEST_ABSENCE_S = 1e9  # of a node that was never seen


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The status of a job. exit_code: None while it goes on. nodes: where it runs or is ordered. by_hand: started with
    `bagua-launch`, so that slots_per_node, priority and what is of a submitter have no meaning."""

    job_id: str
    state: str
    reason: str
    nodes: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    slots_per_node: int
    priority: int
    submitter: str
    submitted_unix_s: float
    exit_code: int | None
    by_hand: bool = False
    position: int = 0  # in the queue, from 1; 0: it does not wait
    fits: bool = True  # a job that waits: the cluster's nodes are enough for it once other jobs end
    ended_unix_s: float = 0.0  # 0: it goes on, or it is not known


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The status of a node. state: ready, trouble, drained, absent. jobs: with the slots that each has. absent_s: for
    how long this reader has missed its key; 0: it is there."""

    node_name: str
    state: str
    reason: str
    slots: int
    taken: int
    jobs: tuple[tuple[str, tuple[int, ...], str], ...]
    labels: tuple[tuple[str, str], ...]
    address: str
    version: str
    absent_s: float = 0.0

    @property
    def going(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """The jobs that have slots here. A node reports a unit that has ended until its order is removed."""
        return tuple(job for job in self.jobs if job[2] != UnitState.ENDED.name.lower())


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    jobs: tuple[JobStatus, ...]
    nodes: tuple[NodeStatus, ...]
    scheduler: str


@dataclass(frozen=True, slots=True)
class ClusterLook:
    """The result of one look at the cluster. values: every key below cluster_keys.EVERYTHING at one revision. view: the
    picture by which the scheduler decides."""

    status: ClusterStatus
    view: ClusterView
    values: Mapping[str, KeyValue]
    now_s: float


class ClusterReader:
    """Reads the cluster again and again, and remembers for ABSENT_KEPT_S the nodes whose key is gone since an earlier
    look. complain: called with each record that can't be read. For one thread."""

    def __init__(self, store: Store, complain: Callable[[str], object]) -> None:
        self._store = store
        self._complain = complain
        self._picture = ClusterPicture(float("-inf"), complain)
        self._values: Mapping[str, KeyValue] = {}

    def look(self) -> ClusterLook:
        """Reads the cluster: jobs in the order of their submission, nodes by name. Raises StoreUnavailable."""
        keys, revision = self._store.get_prefix(cluster_keys.EVERYTHING)
        now_s = time.monotonic()
        values = {kv.key: kv for kv in keys}
        self._picture.take(difference(self._values, values, revision), now_s)
        self._values = values
        view = self._picture.view()
        for name, node in view.nodes.items():
            if not node.present and now_s - node.absent_since_s > ABSENT_KEPT_S:
                self._picture.forget_node(name)
        return ClusterLook(self._status(view, now_s), view, values, now_s)

    def _status(self, view: ClusterView, now_s: float) -> ClusterStatus:
        values = self._values
        # what decisions do not need, of the records that the picture could read
        submissions, records = {}, {}
        for job in view.submissions:
            if (found := values.get(cluster_keys.submission(job.job_id))) is not None:
                with suppress(UnreadableRecord):  # the picture has complained, and has an older one
                    submissions[job.job_id] = parse_submission(found.value, job.job_id)
        for name in view.nodes:
            if (found := values.get(cluster_keys.node(name))) is not None:
                with suppress(UnreadableRecord):
                    records[name] = parse_node(found.value, name)
        return ClusterStatus(
            _jobs(view, submissions, now_s),
            _nodes(view, records, now_s),
            _scheduler(values.get(cluster_keys.SCHEDULER), self._complain),
        )


def cluster_status(store: Store, complain: Callable[[str], object]) -> ClusterStatus:
    """Returns the status of the cluster by one look. complain: called with each record that can't be read. Raises
    StoreUnavailable."""
    return ClusterReader(store, complain).look().status


def _scheduler(holder: KeyValue | None, complain: Callable[[str], object]) -> str:
    """Returns the node that schedules; empty: none."""
    if holder is None:
        return ""
    try:
        return str(pb.Scheduler.FromString(holder.value).node_name)
    except DecodeError as error:
        complain(f"{holder.key}: {error}")
        return "unknown"


def _jobs(view: ClusterView, submissions: dict[str, pb.Submission], now_s: float) -> tuple[JobStatus, ...]:
    made = plan(view, now_s, ClusterPolicy())
    waiting = [j for j in view.submissions if j.job_id in made.jobs and j.job_id not in view.outcomes]
    queue = queue_places(j for j in waiting if made.jobs[j.job_id].state is JobState.QUEUED)
    found = []
    for job in view.submissions:
        record = submissions.get(job.job_id, pb.Submission())
        place = made.jobs.get(job.job_id)
        outcome = view.outcomes.get(job.job_id)
        ordered = tuple(
            sorted(n for n, orders in view.orders.items() if any(o.job_id == job.job_id for o in orders))
        )
        state = JobState.ENDED if outcome else (place.state if place else JobState.QUEUED)
        reason = place.reason if place else ""
        if outcome:
            reason = f"{outcome.end.name.lower()}: {outcome.reason}"
        found.append(
            JobStatus(
                job.job_id,
                state.value,
                reason,
                () if outcome else ordered,
                job.min_nodes,
                job.max_nodes,
                job.slots_per_node,
                job.priority,
                record.submitter,
                record.submitted_unix_s,
                outcome.exit_code if outcome else None,
                position=queue.get(job.job_id, 0),
                fits=place is None or place.fits,
                ended_unix_s=outcome.ended_unix_s if outcome else 0.0,
            )
        )
    return tuple(found)


def queue_places(waiting: Iterable[SubmissionView]) -> dict[str, int]:
    """Returns places from 1, in the order in which the scheduler considers jobs. waiting: in the order of
    submission."""
    ordered = sorted(waiting, key=lambda job: -job.priority)
    return {job.job_id: place for place, job in enumerate(ordered, 1)}


def _nodes(view: ClusterView, records: dict[str, pb.Node], now_s: float) -> tuple[NodeStatus, ...]:
    found = []
    for name in sorted(view.nodes.keys() | {n for n, orders in view.orders.items() if orders}):
        node = view.node(name)
        record = records.get(name, pb.Node())
        state = state_of(node)
        reason = ""
        if state is NodeState.ABSENT:
            reason = "its daemon is not heard of"
        elif state is NodeState.TROUBLE:
            reason = "; ".join(node.troubles)
        elif node.drain is not None:
            reason = node.drain.reason
        if record.note:
            reason = "; ".join(filter(None, (reason, shortened(record.note))))
        jobs = tuple((u.job_id, u.slots, u.state.name.lower()) for u in node.units)
        found.append(
            NodeStatus(
                name,
                state.value,
                reason,
                node.slots,
                taken_slots(node),
                jobs,
                tuple(sorted(node.labels.items())),
                record.address,
                record.version,
                0.0 if node.present else min(now_s - node.absent_since_s, LONGEST_ABSENCE_S),
            )
        )
    return tuple(found)
