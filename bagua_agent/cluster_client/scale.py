"""Writes the desired number of nodes of a running job into etcd, for `bagua-launch scale`.

Writes only desired state; the job's leader follows it at the next step boundary. Never creates a job, and never writes
to one that has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua_agent.base.errors import InfrastructureLost, OutcomeUnknown, UserError
from bagua_agent.cluster_client.cluster_requests import scale_submitted, unknown_job
from bagua_agent.cluster_client.refused_sizes import refuse_of_spec
from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd.client import KeyValue, Put, Store, absent, mod_revision_is
from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import read_message

_CONNECT_TIMEOUT_S = 5.0
# each lost to another writer at that very moment
_MOST_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """A change of a job's number of nodes. was: None if the job's own record was missing or unreadable. Pairs are
    (least, most) nodes."""

    job_id: str
    was: tuple[int, int] | None
    now: tuple[int, int]

    def __str__(self) -> str:
        now = _text(self.now)
        if self.was == self.now:
            return f"job {self.job_id!r}: {now} nodes, as before"
        return f"job {self.job_id!r}: {now} nodes, was {'unknown' if self.was is None else _text(self.was)}"


def request_scale(
    endpoints: Sequence[str],
    job_id: str,
    min_nodes: int,
    max_nodes: int,
    *,
    credentials: StoreCredentials | None = None,
) -> ScaleChange:
    """Asks the job for `min_nodes` to `max_nodes` nodes.

    Raises UserError if there is no such job (naming those there are) or it has ended, and InfrastructureLost if etcd
    does not do it.
    """
    store = Store(store_config(endpoints, credentials or StoreCredentials()))
    try:
        store.connect(_CONNECT_TIMEOUT_S)
        submitted = scale_submitted(store, job_id, min_nodes, max_nodes)
        if submitted is not None:
            return ScaleChange(job_id, submitted, (min_nodes, max_nodes))
        return change_desired(store, job_id, min_nodes, max_nodes)
    finally:
        store.close()


def change_desired(store: Store, job_id: str, min_nodes: int, max_nodes: int) -> ScaleChange:
    """Does what `request_scale` does, on a store that is connected."""
    keys = JobKeys(job_id)
    asked = pb.Desired(min_nodes=min_nodes, max_nodes=max_nodes)
    for _ in range(_MOST_ATTEMPTS):
        spec = store.get(keys.spec)
        if spec is None:
            raise unknown_job(store, job_id)
        if store.get(keys.result) is not None:
            raise UserError(f"job {job_id!r} has ended; use the id of a running job")
        read = read_message(pb.JobSpec, spec.value)
        if read is not None:
            refuse_of_spec(store, job_id, read, min_nodes, max_nodes)
        before = store.get(keys.desired)
        unchanged = (
            absent(keys.desired) if before is None else mod_revision_is(keys.desired, before.mod_revision)
        )
        # the spec too: between reading and writing the job may have ended, and another one of its id begun
        still_the_job = (mod_revision_is(keys.spec, spec.mod_revision), absent(keys.result), unchanged)
        try:
            written = store.transact(still_the_job, [Put(keys.desired, asked.SerializeToString())]).succeeded
        except OutcomeUnknown:
            continue  # the next look finds what was asked for there, or writes it
        if written:
            return ScaleChange(job_id, _pair_in(before), (min_nodes, max_nodes))
    raise InfrastructureLost(
        f"job {job_id!r} changed {_MOST_ATTEMPTS} times while it was to be scaled; try again"
    )


def _pair_in(record: KeyValue | None) -> tuple[int, int] | None:
    desired = None if record is None else read_message(pb.Desired, record.value)
    return None if desired is None else (desired.min_nodes, desired.max_nodes)


def _text(pair: tuple[int, int]) -> str:
    return f"{pair[0]}:{pair[1]}"
