"""Shows the cluster's jobs and nodes. Reads the store once and takes reasons from the scheduler's own decision.

A job's state is not stored: it is computed here by the same pure function with which the scheduler decides, so the
status can't disagree with the decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from bagua_agent.base.plain_text import shortened
from bagua_agent.cluster.cluster_plan import JobState
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import parse_node, parse_submission
from bagua_agent.cluster.cluster_view import ClusterView
from bagua_agent.cluster.scheduling import plan
from bagua_agent.cluster_state.cluster_picture import ClusterPicture
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import KeyValue, Store
from bagua_agent.etcd.mirror import difference
from bagua_contract import cluster_pb2 as pb


@dataclass(frozen=True, slots=True)
class JobStatus:
    """exit_code: None while it goes on. nodes: where it runs or is ordered. by_hand: started with `bagua-launch`, so
    that slots_per_node, priority and what is of a submitter say nothing."""

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


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """state: ready, trouble, drained, absent. jobs: with the slots that each has."""

    node_name: str
    state: str
    reason: str
    slots: int
    taken: int
    jobs: tuple[tuple[str, tuple[int, ...], str], ...]
    labels: tuple[tuple[str, str], ...]
    address: str
    version: str


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    jobs: tuple[JobStatus, ...]
    nodes: tuple[NodeStatus, ...]
    scheduler: str


def cluster_status(store: Store, complain: Callable[[str], object]) -> ClusterStatus:
    """Jobs in the order of their submission, nodes by name. complain: told of each record that can't be read."""
    now_s = time.monotonic()
    keys, revision = store.get_prefix(cluster_keys.EVERYTHING)
    values = {kv.key: kv for kv in keys}
    picture = ClusterPicture(float("-inf"), complain)
    picture.take(difference({}, values, revision), now_s)
    view = picture.view()
    # what decisions do not need, of the records that the picture could read
    submissions = {
        job.job_id: parse_submission(values[cluster_keys.submission(job.job_id)].value, job.job_id)
        for job in view.submissions
    }
    records = {name: parse_node(values[cluster_keys.node(name)].value, name) for name in view.nodes}
    return ClusterStatus(
        _jobs(view, submissions, now_s),
        _nodes(view, records),
        _scheduler(values.get(cluster_keys.SCHEDULER), complain),
    )


def _scheduler(holder: KeyValue | None, complain: Callable[[str], object]) -> str:
    """The node that schedules; empty: none."""
    if holder is None:
        return ""
    try:
        return str(pb.Scheduler.FromString(holder.value).node_name)
    except DecodeError as error:
        complain(f"{holder.key}: {error}")
        return "unknown"


def _jobs(view: ClusterView, submissions: dict[str, pb.Submission], now_s: float) -> tuple[JobStatus, ...]:
    made = plan(view, now_s, ClusterPolicy())
    found = []
    for job in view.submissions:
        record = submissions[job.job_id]
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
            )
        )
    return tuple(found)


def _nodes(view: ClusterView, records: dict[str, pb.Node]) -> tuple[NodeStatus, ...]:
    found = []
    for name in sorted(view.nodes.keys() | {n for n, orders in view.orders.items() if orders}):
        node = view.node(name)
        record = records.get(name, pb.Node())
        if name not in view.nodes:
            state, reason = "absent", "its daemon is not heard of"
        elif node.troubles:
            state, reason = "trouble", "; ".join(node.troubles)
        elif node.drain is not None:
            state, reason = "drained", node.drain.reason
        else:
            state, reason = "ready", ""
        if record.note:
            reason = "; ".join(filter(None, (reason, shortened(record.note))))
        jobs = tuple((u.job_id, u.slots, u.state.name.lower()) for u in node.units)
        found.append(
            NodeStatus(
                name,
                state,
                reason,
                node.slots,
                sum(len(u.slots) for u in node.units if u.alive),
                jobs,
                tuple(sorted(node.labels.items())),
                record.address,
                record.version,
            )
        )
    return tuple(found)
