"""Writes an agent's failure on a node into the job's events, for an agent that may never have joined."""

from __future__ import annotations

import time

from bagua_agent.cluster.cluster_records import nonce_of
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Put, Store, absent
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.history.job_history import JobEvent
from bagua_contract import cluster_pb2 as pb


def write_failure(store: Store, submission: pb.Submission, event: JobEvent, node_name: str) -> bool:
    """Writes the event of an agent's failure. Returns False if the job is over, so that agents end as they should, or
    was removed. Raises InfrastructureLost."""
    keys = JobKeys(submission.job_id)
    unended = [
        absent(keys.result),
        absent(cluster_keys.outcome(submission.job_id)),
        absent(cluster_keys.removal(nonce_of(submission))),
    ]
    return store.transact(
        unended, [Put(keys.event(event.name), event.encode(node_name, time.time()))]
    ).succeeded
