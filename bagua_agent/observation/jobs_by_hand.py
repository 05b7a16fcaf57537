"""Says how jobs are that were started by hand with `bagua-launch`: an etcd knows them, and no submission names them.

Such a job has no scheduler; its own keys say how it is. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from bagua_agent.base.plain_text import counted, shortened
from bagua_agent.etcd.client import KeyValue
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.observation.cluster_status import JobStatus
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import read_message


def jobs_by_hand(records: Iterable[KeyValue], submitted: Collection[str]) -> tuple[JobStatus, ...]:
    """Returns the jobs that were started by hand, by id. Keys under names that no job can have are passed over.
    Pure."""
    by_job: dict[str, list[KeyValue]] = defaultdict(list)
    for record in records:
        if (job_id := JobKeys.job_in(record.key)) is not None:
            by_job[job_id].append(record)
    by_hand = sorted(by_job.keys() - set(submitted))
    found = (status_of(job_id, by_job[job_id]) for job_id in by_hand)
    return tuple(job for job in found if job is not None)


def status_of(job_id: str, records: Iterable[KeyValue]) -> JobStatus | None:
    """Returns the status of a job from its own keys; None where the keys are no job's. Pure."""
    keys = JobKeys(job_id)
    values = {record.key: record.value for record in records}
    if keys.spec not in values:
        return None
    agents = (read_message(pb.Agent, v) for k, v in values.items() if k.startswith(keys.agents))
    nodes = tuple(sorted({agent.node_name for agent in agents if agent is not None}))
    desired = read_message(pb.Desired, values.get(keys.desired, b"")) or pb.Desired()
    ended = result_of(values[keys.result]) if keys.result in values else None
    if ended is not None:
        state, reason = "ended", f"{ended[0]}: {ended[2]}"
    else:
        state, reason = _state(values, keys, nodes, desired)
    return JobStatus(
        job_id, state, reason, () if ended else nodes, desired.min_nodes, desired.max_nodes, 0, 0, "", 0.0,
        ended[1] if ended else None, by_hand=True,
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
    # else it is the head of a large record, which lists no worker
    is_whole = not generation.HasField("parts")
    replicas = f"{counted(workers // size, 'replica')} of {size} workers; " if size > 1 and is_whole else ""
    return "running", f"generation {generation.number}; {replicas}{counted(len(nodes), 'node')} present"


def result_of(value: bytes) -> tuple[str, int, str]:
    """Returns outcome, exit code and reason of a job's own result."""
    record = read_message(pb.Result, value)
    if record is None or record.outcome not in pb.Result.Outcome.values():
        return "failed", 1, "its result can't be read"
    return pb.Result.Outcome.Name(record.outcome).lower(), record.exit_code, shortened(record.reason)
