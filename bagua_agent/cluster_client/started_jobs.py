"""Shows and stops jobs that were started by hand with `bagua-launch`: an etcd knows them, and no submission names them.

Such a job has no scheduler; its own keys say how it is. A request to stop it is a leased key, so it ends no later job
of the same id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from bagua_agent.base.errors import UserError
from bagua_agent.base.plain_text import counted, shortened, some
from bagua_agent.cluster_client.cluster_requests import JobEnded, unknown_job
from bagua_agent.cluster_client.cluster_status import JobStatus
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import KeyValue, Put, Store, absent, mod_revision_is
from bagua_agent.etcd.keys import JOBS_PREFIX, JobKeys
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import read_message

STOP_KEPT_S = 60  # each agent sees it within moments; one that starts later begins the job again
_MOST_NAMED = 20


def is_submitted(store: Store, job_id: str) -> bool:
    return store.get(cluster_keys.submission(job_id)) is not None


def started_jobs(store: Store, submitted: Collection[str]) -> tuple[JobStatus, ...]:
    """By id. submitted: jobs that the cluster shows itself. Keys under names that no job can have are passed over."""
    by_job: dict[str, list[KeyValue]] = defaultdict(list)
    for record in store.get_prefix(JOBS_PREFIX)[0]:
        if (job_id := JobKeys.job_in(record.key)) is not None:
            by_job[job_id].append(record)
    by_hand = sorted(by_job.keys() - set(submitted))
    found = (status_of(job_id, by_job[job_id]) for job_id in by_hand)
    return tuple(job for job in found if job is not None)


def started_job(store: Store, job_id: str) -> JobStatus | None:
    return status_of(job_id, store.get_prefix(JobKeys(job_id).prefix)[0])


def status_of(job_id: str, records: Iterable[KeyValue]) -> JobStatus | None:
    """None where the keys are no job's. Pure."""
    keys = JobKeys(job_id)
    values = {record.key: record.value for record in records}
    if keys.spec not in values:
        return None
    agents = (read_message(pb.Agent, v) for k, v in values.items() if k.startswith(keys.agents))
    nodes = tuple(sorted({agent.node_name for agent in agents if agent is not None}))
    desired = read_message(pb.Desired, values.get(keys.desired, b"")) or pb.Desired()
    ended = end_of(values[keys.result]) if keys.result in values else None
    if ended is not None:
        state, reason = "ended", f"{ended.outcome}: {ended.reason}"
    else:
        state, reason = _state(values, keys, nodes, desired)
    return JobStatus(
        job_id, state, reason, () if ended else nodes, desired.min_nodes, desired.max_nodes, 0, 0, "", 0.0,
        ended.exit_code if ended else None, by_hand=True,
    )  # fmt: skip


def _state(
    values: Mapping[str, bytes], keys: JobKeys, nodes: Collection[str], desired: pb.Desired
) -> tuple[str, str]:
    if not nodes:
        return "absent", "no node of it is present; start nodes with its --rdzv-id and it goes on"
    generation = read_message(pb.Generation, values.get(keys.generation, b""))
    if generation is None or not generation.number:
        return "starting", f"{len(nodes)} of {counted(desired.min_nodes, 'node')} are present"
    spec = read_message(pb.JobSpec, values.get(keys.spec, b"")) or pb.JobSpec()
    size, workers = spec.replica_size, len(generation.members)
    replicas = f"{counted(workers // size, 'replica')} of {size} workers; " if size > 1 else ""
    return "running", f"generation {generation.number}; {replicas}{counted(len(nodes), 'node')} present"


def end_of(value: bytes) -> JobEnded:
    """Of a job's own result."""
    record = read_message(pb.Result, value)
    if record is None or record.outcome not in pb.Result.Outcome.values():
        return JobEnded("failed", 1, "its result can't be read")
    return JobEnded(
        pb.Result.Outcome.Name(record.outcome).lower(), record.exit_code, shortened(record.reason)
    )


def request_stop(store: Store, job_id: str) -> str:
    """Ask every node of the job to leave; a line for the person who asked. Raises UserError."""
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
    if not store.transact(same_job, [Put(keys.stop, b"stop", lease.lease_id)]).succeeded:
        raise UserError(
            f"job {job_id!r} changed meanwhile; look at `bagua-launch status {job_id}` and try again"
        )
    return f"job {job_id!r} stops at its next step boundary, on {some(job.nodes, _MOST_NAMED)}"


def no_logs(job: JobStatus) -> UserError:
    """Why `logs` has nothing of such a job whose agents are gone, and where its output is."""
    return UserError(
        f"job {job.job_id!r} was started by hand and no node of it is present, so its output is in the terminals "
        "of its nodes, and in the folder that --log-dir named there"
    )
