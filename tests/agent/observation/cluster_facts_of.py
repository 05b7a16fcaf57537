"""Facts of a small cluster for tests: nodes and jobs as its status shows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bagua_agent.observation.cluster_facts import ClusterFacts
from bagua_agent.observation.cluster_status import ClusterStatus, JobStatus, NodeStatus

NOW_S = 10_000.0


def member(name: str, *jobs: str, state: str = "ready", **other: Any) -> NodeStatus:
    """jobs: each runs on a slot of the node's four."""
    units = tuple((job_id, (slot,), "running") for slot, job_id in enumerate(jobs))
    found = NodeStatus(name, state, "", 4, len(jobs), units, (), f"{name}:7461", "1.0")
    return replace(found, **other)


def submitted(name: str, state: str = "running", **other: Any) -> JobStatus:
    nodes = ("h1",) if state == "running" else ()
    found = JobStatus(
        name, state, f"is {state} for a reason", nodes, 1, 2, 0, 0, "ann@desk", NOW_S - 60, None
    )
    return replace(found, **other)


def cluster(
    *nodes: NodeStatus, jobs: tuple[JobStatus, ...] = (), scheduler: str = "h1", **other: Any
) -> ClusterFacts:
    ends = {job.job_id: job.ended_unix_s for job in jobs if job.exit_code is not None}
    return ClusterFacts(NOW_S, ClusterStatus(jobs, nodes, scheduler), ends_unix_s=ends, **other)
