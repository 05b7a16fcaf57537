"""Removes a job from etcd: one transaction deletes all of its keys and writes a removal.

The removal is found under the submission's nonce. Each write that puts a key of the job back
compares that it is absent.
"""

from __future__ import annotations

from bagua_agent.cluster.cluster_records import write_removal
from bagua_agent.cluster.cluster_view import RemovalView
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Compare, Put, Store, none_below
from bagua_agent.etcd.keys import JobKeys


def remove_job(store: Store, job_id: str, nonce: str, now_unix_s: float, *conditions: Compare) -> bool:
    """Removes a job. Returns False if a condition does not hold, or an agent of the job is there. conditions: at least
    that the submission is the one of `nonce`, or that there is none; the nonce is empty if it is not known. Raises
    InfrastructureLost, UserError."""
    keys = JobKeys(job_id)
    unused = [*conditions, none_below(keys.agents)]
    removed = write_removal(RemovalView(job_id, now_unix_s))
    removals = [Put(cluster_keys.removal(nonce), removed)] if nonce else []
    own = [cluster_keys.submission(job_id), cluster_keys.outcome(job_id)]
    return store.transact(unused, removals, own, delete_ranges=keys.ranges).succeeded
