"""Decides whether a node is lost or left out for a job, and when a unit that failed there starts again."""

from __future__ import annotations

from bagua_agent.base import backoff
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_view import NodeView, UnitState, UnitView


def lost_at_s(node: NodeView, policy: ClusterPolicy) -> float | None:
    """Returns from when on an absent node counts as lost; None: it is there."""
    return None if node.present else node.absent_since_s + policy.node_lost_s


def is_lost(node: NodeView, now_s: float, policy: ClusterPolicy) -> bool:
    at_s = lost_at_s(node, policy)
    return at_s is not None and now_s >= at_s


def settled_at_s(since_s: float, policy: ClusterPolicy) -> float:
    """Returns when a picture that begins at since_s is whole: until then absence may only mean not yet put back."""
    return since_s + policy.settle_s


def why_left_out(unit: UnitView | None, policy: ClusterPolicy) -> str:
    """Returns why the job of this unit does without its node; empty: it does not. A unit that lives is never given
    up."""
    if unit is None or unit.alive:
        return ""
    if unit.state is UnitState.REFUSED:
        return unit.reason or "it can't be started there"
    if unit.failures >= policy.failures_before_left_out:
        return f"{unit.failures} failures in a row" + (f", the last: {unit.reason}" if unit.reason else "")
    return ""


def failures_after(failures: int, ran_s: float, asked: bool, policy: ClusterPolicy) -> int:
    """Returns the failures in a row once a unit has ended. asked: it was asked to end, so its end is no failure."""
    if asked:
        return failures
    return 1 if ran_s >= policy.unit_steady_s else failures + 1


def start_again_at_s(ended_s: float, failures: int, policy: ClusterPolicy) -> float | None:
    """Returns when a unit that ended is started again while it is ordered; None: not before it is forgotten.

    The delay applies without a failure too: mostly its job is over, and the scheduler is about to write the outcome.
    """
    if failures >= policy.failures_before_left_out:
        return None
    return ended_s + backoff.delay_s(max(failures, 1), policy.unit_first_delay_s, policy.unit_longest_delay_s)


def forgotten_at_s(ended_s: float, policy: ClusterPolicy) -> float:
    """Returns when the node gets another chance with a job that it was left out for."""
    return ended_s + policy.left_out_s
