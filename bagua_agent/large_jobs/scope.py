"""Decides which of the job's keys this agent follows: all, or in a large job its own and those for every agent.

The leader needs all keys. If each of N agents followed the keys of all others, every join would be sent N times and a
start N squared times; so the other agents of a large job follow `control/` and `replicas/`, which the leader writes,
and refusals of their own workers. If their own keys vanish, they notice it by a record without them. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.large_jobs.limits import Limits


class Scope(Enum):
    WHOLE = "all keys"
    OWN = "the leader's word"


@dataclass(frozen=True, slots=True)
class ScopeSituation:
    """The facts that the scope depends on.

    leads: this agent is the leader, or was elected and has yet to see all. hosts_store: it waits at the end until the
    others have left. strange_spec: another job's spec exists under this one's name. nodes: number of agents, as far as
    it sees them; 0: unknown.
    """

    leads: bool
    hosts_store: bool
    strange_spec: bool
    nodes: int
    present: Scope


def scope_of(now: ScopeSituation, limits: Limits) -> tuple[Scope, str]:
    """Decides what to follow from now on, and why."""
    if now.leads:
        return Scope.WHOLE, "the leader decides on the whole picture"
    if now.hosts_store:
        return Scope.WHOLE, "the host of etcd leaves last"
    if now.strange_spec:
        return Scope.WHOLE, "whether to give way depends on what the other job's workers did"
    if now.nodes > limits.whole_picture_nodes:
        return Scope.OWN, f"{now.nodes} nodes are more than {limits.whole_picture_nodes}"
    if now.present is Scope.OWN:
        # The record does not tell how many wait outside; and a job that has shrunk runs as well like this.
        return Scope.OWN, "the job was large"
    return Scope.WHOLE, "the job is small"


def ranges_of(scope: Scope, keys: JobKeys, agent_id: str) -> tuple[KeyRange, ...]:
    """Returns the ranges of a scope. Keys that one transaction may change are in one range, so that the changes arrive
    together."""
    if scope is Scope.WHOLE:
        return (KeyRange.of_prefix(keys.prefix),)
    # a worker is named after its agent
    return (
        KeyRange.of_prefix(keys.control),
        KeyRange.of_prefix(keys.replicas),
        KeyRange.of_prefix(f"{keys.refusals}{agent_id}."),
    )
