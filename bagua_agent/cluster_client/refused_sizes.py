"""Refuses numbers of nodes that a job can't be scaled to: sizes that it does not allow, and nodes without a replica.

A job with a range that holds no allowed size, or no whole replica, would stop to train until it is scaled again.
"""

from __future__ import annotations

from bagua_agent.base.errors import UserError
from bagua_agent.base.plain_text import counted
from bagua_agent.base.sizes import SizePolicy, nodes_with_a_part, whole_replicas
from bagua_agent.config.job_config_file import SUBMITTED, decode
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_contract import cluster_pb2, membership_pb2
from bagua_contract.records import read_message


def refuse_of_submission(submission: cluster_pb2.Submission, least: int, most: int) -> None:
    """Refuses numbers of nodes that a submitted job can't have. Raises UserError. The scheduler gives a submitted job
    every node up to the most, so each of these needs a part of a replica too."""
    job_id, slots = submission.job_id, submission.slots_per_node
    _refuse_forbidden(job_id, SizePolicy.of(submission.size_policy), least, most)
    try:
        size = decode(submission.launch, SUBMITTED, job_id=job_id).replica_size
    except UserError:
        return  # no node runs it, and each says why
    if slots and size:  # otherwise each node is a replica
        _refuse_partial(job_id, size, {slots}, least, most)


def refuse_of_spec(store: Store, job_id: str, spec: membership_pb2.JobSpec, least: int, most: int) -> None:
    """Refuses numbers of nodes that a job without a scheduler can't have. Raises UserError. As at its start, such a job
    may have spare nodes at its most."""
    try:
        policy = SizePolicy.of(spec.size_policy)
    except ValueError as error:
        raise UserError(f"job {job_id!r}: its sizes can't be read ({error}); start it again") from error
    _refuse_forbidden(job_id, policy, least, most)
    if spec.replica_size <= 1:
        return
    records = [kv.value for kv in store.get_prefix(JobKeys(job_id).agents)[0]]
    agents = [agent for value in records if (agent := read_message(membership_pb2.Agent, value)) is not None]
    _refuse_partial(job_id, spec.replica_size, {agent.slots for agent in agents if agent.slots}, least)


def _refuse_forbidden(job_id: str, policy: SizePolicy, *nodes: int) -> None:
    forbidden = policy.forbidden(*nodes)
    if forbidden is not None:
        what = f"{counted(forbidden, 'node')}: not an allowed size"
        raise UserError(f"job {job_id!r} can't be scaled to {what}; use sizes among {policy.text}")


def _refuse_partial(job_id: str, replica_size: int, slots: set[int], *nodes: int) -> None:
    """Refuses numbers of nodes of which some would hold no part of a replica. slots: those that the job's nodes have.
    Of nodes with different numbers, only so few are refused that the largest hold no replica: which nodes the job will
    have is not known."""
    if not slots:
        return
    largest = max(slots)
    for number in nodes:
        used = nodes_with_a_part(number, largest, replica_size)
        if used == number or (used and len(slots) > 1):
            continue
        below, above = whole_replicas(number, largest, replica_size)
        replicas = f"of {counted(replica_size, 'worker')}"
        holds = (
            f"hold replicas {replicas} on {counted(used, 'node')} only"
            if used
            else f"hold no replica {replicas}"
        )
        use = f"{below} or {counted(above, 'node')}" if below else f"at least {counted(above, 'node')}"
        workers = f"{counted(number, 'node')} with {counted(largest, 'worker')} each"
        raise UserError(f"job {job_id!r} can't be scaled: {workers} {holds}; use {use}")
