"""Decides what follows when a worker ends with 0 before it asks to join a job that has not trained. Pure.

Such a worker gets no successor, so its node never becomes complete. The job continues with the other nodes if they are
enough. If they are not, they wait for another node up to join_timeout; then the job fails with that reason. Every agent
reports it, not only the leader.
"""

from __future__ import annotations

from bagua_agent.base.plain_text import some
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import EndedBeforeJoining, JobView

MOST_NAMES = 8


def ends_of(view: JobView) -> tuple[EndedBeforeJoining, ...]:
    """Returns the workers that ended so and that the first generation lacks, oldest end first; none once the job
    trains, nor of nodes that left."""
    record = view.generation
    if not record.is_gathering if record is not None else view.has_trained:
        return ()
    found = (e for e in view.ended_before_joining.values() if e.agent_id in view.agents)
    return tuple(sorted(found, key=lambda e: (e.seen_since_s, e.node_name)))


def described(view: JobView) -> str:
    """Names the nodes that have such workers, in a sentence; empty if none has."""
    nodes = list(dict.fromkeys(e.node_name for e in ends_of(view)))
    if not nodes:
        return ""
    return f"a worker on {some(nodes, MOST_NAMES)} ended with 0 before it joined the job"


def fails_at_s(view: JobView, policy: Policy) -> float | None:
    """Returns the time at which a job with too few nodes fails because of such ends; None: never."""
    early = ends_of(view)
    if not early or policy.join_timeout_s is None:
        return None
    return early[-1].seen_since_s + policy.join_timeout_s


def expected(view: JobView, policy: Policy) -> str:
    """Describes for people what happened and what follows while there are too few nodes; empty if no worker ended
    so."""
    what = described(view)
    if not what:
        return ""
    limit_s = policy.join_timeout_s
    follows = (
        "the job waits for another node without limit"
        if limit_s is None
        else f"the job fails {limit_s:g} s after that (--rdzv-conf join_timeout=S) unless another node joins"
    )
    return f"{what}; {follows}"
