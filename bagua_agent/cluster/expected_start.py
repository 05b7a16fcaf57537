"""Predicts when waiting jobs start, from the times at which running jobs are expected to end. Pure.

Each expected end is played through with the scheduler's own decision, so a prediction follows its rules: order,
priorities, claims, sizes. Nodes that fail, jobs that are submitted later and the time of jobs that start meanwhile are
not known, so a prediction is what holds if nothing else changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bagua_agent.cluster.cluster_plan import JobState
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import ClusterView
from bagua_agent.cluster.scheduling import plan

MOST_ENDS = 16  # each costs one plan of the whole cluster


def expected_starts(
    view: ClusterView, now_s: float, policy: ClusterPolicy, ends_in_s: Mapping[str, float]
) -> dict[str, float]:
    """Returns the seconds from now until a waiting job is given its nodes; jobs without a prediction are left out.

    ends_in_s: of running jobs whose end can be estimated.
    """
    waiting = _queued(view, now_s, policy)
    starts: dict[str, float] = {}
    for job_id, end_s in sorted(ends_in_s.items(), key=lambda pair: (pair[1], pair[0]))[:MOST_ENDS]:
        if not waiting:
            break
        view = _without(view, job_id)
        made = plan(view, now_s, policy)
        view = replace(view, orders={**view.orders, **made.orders})
        started = {j for j in waiting if j in made.jobs and made.jobs[j].state is not JobState.QUEUED}
        starts.update(dict.fromkeys(started, end_s))
        waiting -= started
    return starts


def _queued(view: ClusterView, now_s: float, policy: ClusterPolicy) -> set[str]:
    jobs = plan(view, now_s, policy).jobs
    return {job_id for job_id, found in jobs.items() if found.state is JobState.QUEUED}


def _without(view: ClusterView, job_id: str) -> ClusterView:
    """Returns the view as if the job had ended and was removed."""
    nodes = {
        name: replace(node, units=tuple(u for u in node.units if u.job_id != job_id))
        for name, node in view.nodes.items()
    }
    orders = {name: tuple(o for o in orders if o.job_id != job_id) for name, orders in view.orders.items()}
    submissions = tuple(s for s in view.submissions if s.job_id != job_id)
    progress = {j: found for j, found in view.progress.items() if j != job_id}
    return replace(view, nodes=nodes, orders=orders, submissions=submissions, progress=progress)
