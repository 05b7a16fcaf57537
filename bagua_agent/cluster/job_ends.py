"""Decides whether a job is over, and which of its orders remain while its units end."""

from __future__ import annotations

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import (
    ClusterView,
    JobEnd,
    NodeView,
    OutcomeView,
    SubmissionView,
    UnitState,
)
from bagua_agent.cluster.node_trouble import is_lost


def known_end(view: ClusterView, job_id: str) -> OutcomeView | None:
    """Returns the outcome that is written, or the result that the job gave itself; None: it goes on."""
    progress = view.progress.get(job_id)
    return view.outcomes.get(job_id) or (progress.result if progress else None)


def asked_to_leave_at_s(view: ClusterView, job_id: str, policy: ClusterPolicy) -> float:
    """Returns when units of an ended job that are still there are asked to leave: they end by themselves, mostly at
    once."""
    progress = view.progress.get(job_id)
    seen = (view.outcomes.get(job_id), progress.result if progress else None)
    return min(end.since_s for end in seen if end is not None) + policy.wind_down_s


def still_ends(node: NodeView, job_id: str, now_s: float, policy: ClusterPolicy) -> bool:
    """Tells whether a unit of a job that is over, or stops, may still be there: its slots are not free."""
    if is_lost(node, now_s, policy):
        return False
    unit = node.unit(job_id)
    return not node.present or (unit is not None and unit.alive)


def stopped(
    view: ClusterView, job: SubmissionView, now_s: float, policy: ClusterPolicy
) -> OutcomeView | None:
    """Returns the outcome of a job that was asked to stop and has no unit and no result; None: something may still
    live."""
    for node in view.nodes.values():
        unit = node.unit(job.job_id)
        if unit is not None and unit.alive and not is_lost(node, now_s, policy):
            return None
    progress = view.progress.get(job.job_id)
    if progress is None or not progress.begun:
        return OutcomeView(
            JobEnd.STOPPED, 0, "stopped before it began" + _last_trouble(view, job.job_id), now_s
        )
    return OutcomeView(JobEnd.STOPPED, 0, "stopped; its agents are gone and wrote no result", now_s)


def _last_trouble(view: ClusterView, job_id: str) -> str:
    """Returns what kept the job's agent from working on a node, as a part of a sentence; empty if nothing is known."""
    for name in sorted(view.nodes):
        unit = view.nodes[name].unit(job_id)
        if unit is not None and unit.reason and (unit.failures or unit.state is UnitState.REFUSED):
            return f"; on {name}: {unit.reason}"
    return ""
