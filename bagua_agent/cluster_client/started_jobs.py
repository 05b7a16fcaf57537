"""Shows and stops jobs that were started by hand with `bagua-launch`: an etcd knows them, and no submission names them.

A request to stop it is a leased key, so it ends no later job
of the same id.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from bagua_agent.base.errors import UserError
from bagua_agent.base.plain_text import some
from bagua_agent.cluster_client.cluster_requests import JobEnded, unknown_job
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import KeyValue, Put, Store, absent, mod_revision_is
from bagua_agent.etcd.keys import JOBS_PREFIX, JobKeys
from bagua_agent.large_jobs.stored_record import whole_value
from bagua_agent.observation.cluster_status import JobStatus
from bagua_agent.observation.jobs_by_hand import jobs_by_hand, result_of, status_of

STOP_KEPT_S = 60  # each agent sees it within moments; one that starts later begins the job again
_MOST_NAMED = 20


def is_submitted(store: Store, job_id: str) -> bool:
    return store.get(cluster_keys.submission(job_id)) is not None


def started_jobs(store: Store, submitted: Collection[str]) -> tuple[JobStatus, ...]:
    """Returns the jobs that were started by hand, by id. submitted: jobs that the cluster shows itself. Raises
    StoreUnavailable."""
    return jobs_by_hand(store.get_prefix(JOBS_PREFIX)[0], submitted)


def started_job(store: Store, job_id: str) -> JobStatus | None:
    keys = JobKeys(job_id)
    records = store.get_prefix(keys.prefix)[0]
    return status_of(job_id, [_whole(store, keys, r) if r.key == keys.generation else r for r in records])


def _whole(store: Store, keys: JobKeys, record: KeyValue) -> KeyValue:
    """Returns the whole record of a large job's generation; only its head if that was replaced meanwhile."""
    return replace(record, value=whole_value(store, keys, record.value) or record.value)


def end_of(value: bytes) -> JobEnded:
    """Returns the end of a job from its own result."""
    return JobEnded(*result_of(value))


def request_stop(store: Store, job_id: str) -> str:
    """Asks every node of the job to leave, and returns a line for the person who asked. Raises UserError."""
    keys = JobKeys(job_id)
    job, spec = started_job(store, job_id), store.get(keys.spec)
    if job is None or spec is None:
        raise unknown_job(store, job_id)
    if job.state == "ended":
        raise UserError(f"job {job_id!r} has ended; `bagua-launch status` shows those that run")
    if not job.nodes:
        raise UserError(f"job {job_id!r} has no node that could stop; {job.reason}")
    lease = store.lease_grant(STOP_KEPT_S)
    same_job = [mod_revision_is(keys.spec, spec.mod_revision), absent(keys.result)]
    if not store.transact(same_job, [Put(keys.stop, b"stop", lease.lease_id)], repeatable=True).succeeded:
        raise UserError(
            f"job {job_id!r} changed meanwhile; look at `bagua-launch status {job_id}` and try again"
        )
    return f"job {job_id!r} stops at its next step boundary, on {some(job.nodes, _MOST_NAMED)}"


def no_logs(job: JobStatus) -> UserError:
    """Returns why `logs` has nothing of such a job whose agents are gone, and where its output is."""
    return UserError(
        f"job {job.job_id!r} was started by hand and no node of it is present, so its output is in the terminals "
        "of its nodes, and in the folder that --log-dir named there"
    )
